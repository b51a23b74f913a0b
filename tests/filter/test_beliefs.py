"""Beliefs that are not Gaussian: the contract with references from outside the recursion, densities, layers, models."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

import membydesign as mbd
from membydesign.filter.kernels import why_not_each
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.testing import DesignContract, assert_close, random_problem

DESIGNS = {
    "count_memory": mbd.CountMemory(events=0.5, exposure=2.0),
    "categorical_memory": mbd.CategoricalMemory(concentration=0.7),
    "hidden_markov": mbd.HiddenMarkov(),
}
WAYS = {
    "Recurrent": {"method": "recurrent"},
    "Chunk": {"method": "chunk", "chunk_size": 4},
    "Native": {"method": "chunk", "backend": "native"},
}


def left_over(log_decay, t):
    """What tokens s ≤ t have left at t, [B,t+1,H], and what the prior has left, [B,H]."""
    left = torch.stack([log_decay[:, s + 1 : t + 1].sum(1).exp() for s in range(t + 1)], 1)
    return left, log_decay[:, : t + 1].sum(1).exp()


class Counts(DesignContract):
    design = DESIGNS["count_memory"]
    linear_in_values = False

    def oracle(self, problem):
        """The conjugate posterior, from sums over the whole history."""
        q, k, v = problem.q, problem.k, problem.v
        outputs, evidence = [], q.new_zeros(())
        for t in range(q.shape[1]):
            left, of_prior = left_over(problem.parameters["log_decay"], t)
            a = torch.einsum("bsh,bshd,bshm->bhdm", left[:, :t], k[:, :t], v[:, :t])
            a = a + (self.design.events * of_prior)[..., None, None]
            b = torch.einsum("bsh,bshd->bhd", left[:, :t], k[:, :t]) + (self.design.exposure * of_prior)[..., None]
            counted = torch.einsum("bhd,bhm->bhdm", k[:, t], v[:, t])
            success = (k[:, t] / (b + k[:, t]))[..., None]
            predictive = torch.distributions.NegativeBinomial(a, success, validate_args=False)
            evidence = evidence + predictive.log_prob(counted).sum((-2, -1))
            outputs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], (a + counted) / (b + k[:, t])[..., None]))
        return torch.stack(outputs, 1), evidence


class Categories(DesignContract):
    design = DESIGNS["categorical_memory"]
    linear_in_values = False

    def oracle(self, problem):
        """The Dirichlet posterior, from sums over the whole history, and ratios of multivariate Beta functions."""
        q, k, v = problem.q, problem.k, problem.v

        def log_beta(x):
            return x.lgamma().sum(-1) - x.sum(-1).lgamma()

        outputs, evidence = [], q.new_zeros(())
        for t in range(q.shape[1]):
            left, _ = left_over(problem.parameters["log_decay"], t)
            votes = torch.einsum("bsh,bshd,bshm->bshdm", left, k[:, : t + 1], v[:, : t + 1])
            before, after = self.design.concentration + votes[:, :t].sum(1), self.design.concentration + votes.sum(1)
            new = votes[:, t]
            ways = (new.sum(-1) + 1).lgamma() - (new + 1).lgamma().sum(-1)
            evidence = evidence + (log_beta(after) - log_beta(before) + ways).sum(-1)
            outputs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], after / after.sum(-1, keepdim=True)))
        return torch.stack(outputs, 1), evidence


class Chains(DesignContract):
    design = DESIGNS["hidden_markov"]
    linear_in_values = False

    def oracle(self, problem):
        """A sum over all D^(t+1) paths of states, for every t."""
        q, k, v = problem.q, problem.k, problem.v
        _, T, _, D = q.shape
        stay = problem.parameters["log_decay"].exp()
        outputs, evidence = [], q.new_zeros(())
        for t in range(T):
            paths = torch.tensor(list(product(range(D), repeat=t + 1)))  # [P,t+1]
            weight = torch.full((), -math.log(D), dtype=q.dtype)  # the state before the first token; it may jump
            weight = weight.expand(*v.shape[:1], *v.shape[2:], len(paths))
            for s in range(t + 1):
                if s:
                    stays, a = (paths[:, s] == paths[:, s - 1]).to(q), stay[:, s, :, None]
                    weight = weight + (a * stays + (1 - a) / D).log()[:, :, None]
                weight = weight + k[:, s, :, None][..., paths[:, s]] * v[:, s, ..., None]
            last = torch.nn.functional.one_hot(paths[:, t], D).to(q)
            outputs.append(torch.einsum("bhmp,pd,bhd->bhm", weight.softmax(-1), last, q[:, t]))
            evidence = weight.logsumexp(-1).sum(-1)
        return torch.stack(outputs, 1), evidence


for _case, (_way, _options) in product((Counts, Categories, Chains), WAYS.items()):
    if not (_case is Chains and _way == "Native"):
        if _way != "Recurrent":
            _options = {**_options, "test_every_kernel_equals_the_loop": None}
        globals()[f"Test{_case.__name__}{_way}"] = type(f"Test{_case.__name__}{_way}", (_case,), _options)


@pytest.mark.parametrize("name", DESIGNS)
def test_chunks_are_the_default_and_reasons_are_told(name):
    reasons = why_not_each(DESIGNS[name])
    ours = {"hidden_markov": ["torch, hidden Markov chains in chunks"]}
    sums = ["native, sums in chunks", "torch, sums in chunks"]
    assert [kernel for kernel, reason in reasons.items() if reason is None][:-1] == ours.get(name, sums)
    other = why_not_each(mbd.catalogue["kda"])
    assert all(other[kernel].startswith("for KDA") for kernel in ours.get(name, sums))


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", ["count_memory", "categorical_memory"])
def test_evidence_and_variance_do_not_change_the_output(name, backend):
    problem = replace(random_problem(DESIGNS[name], T=40, D=8), options={"backend": backend})
    bare, full = problem.filter(), problem.filter(return_evidence=True, return_variance=True)
    assert torch.equal(bare.output, full.output)
    loop = (
        problem.filter(method="recurrent", return_evidence=True, return_variance=True) if backend == "torch" else full
    )
    assert_close(full.variance, loop.variance, 1e-10)


def test_whole_counts_of_one_slot_are_a_distribution():
    """The density of the next write sums to one over all counts."""
    n = torch.arange(400, dtype=torch.float64)[:, None, None, None]
    one = torch.ones_like(n)
    first = mbd.Counts(torch.full((400, 1, 1, 1), 2.5).double(), torch.full((400, 1, 1), 1.5).double())
    out = mbd.filter_sequence(mbd.CountMemory(), one, one, n, initial=first, log_decay=-0.2, return_evidence=True)
    assert abs(out.log_evidence.exp().sum().item() - 1) < 1e-9


@pytest.mark.parametrize("votes", [1, 3])
def test_whole_votes_of_one_slot_are_a_distribution(votes):
    every = [x for x in product(range(votes + 1), repeat=3) if sum(x) == votes]
    v = torch.tensor(every, dtype=torch.float64)[:, None, None]
    k = torch.ones(len(every), 1, 1, 1, dtype=torch.float64)
    first = mbd.Votes(torch.tensor([0.5, 2.0, 3.0]).double().expand(len(every), 1, 1, 3))
    out = mbd.filter_sequence(
        mbd.CategoricalMemory(), k, k, v, initial=first, log_decay=math.log(0.8), return_evidence=True
    )
    assert abs(out.log_evidence.exp().sum().item() - 1) < 1e-12
    if votes == 1:
        alpha = 0.8 * first.concentration[0, 0, 0] + 0.2
        assert_close(out.log_evidence[:, 0].exp(), (v[:, 0, 0] @ alpha) / alpha.sum(), 1e-12)


@pytest.mark.parametrize("name", DESIGNS)
def test_variance_is_that_of_samples(name):
    """Of 200,000 draws from the belief: Gamma rates, Dirichlet distributions, states."""
    torch.manual_seed(0)
    problem = random_problem(DESIGNS[name], B=1, H=1, D=3, M=2)
    out = problem.filter(return_variance=True)
    (belief, *rest), q, n = (x[0, 0] for x in out.belief), problem.q[0, -1, 0], (200_000,)
    if name == "count_memory":
        draws = torch.distributions.Gamma(belief, rest[0][:, None].expand_as(belief)).sample(n)
    elif name == "categorical_memory":
        draws = torch.distributions.Dirichlet(belief).sample(n)
    else:
        states = torch.distributions.Categorical(logits=belief.T).sample(n)  # [n,M]
        draws = torch.nn.functional.one_hot(states, 3).mT.double()
    reads = torch.einsum("d,ndm->nm", q, draws)
    assert_close(reads.mean(0), out.output[0, -1, 0], 0.01)
    assert_close(reads.var(0), out.variance[0, -1, 0], 0.02)


@pytest.mark.parametrize("log_decay", [0.0, -1e-3])
@pytest.mark.parametrize("method", ["chunk", "recurrent"])
def test_evidence_against_a_state_can_be_withdrawn(method, log_decay):
    """400 nats for one state, then 410 for another: float32 probabilities underflow, logarithms do not."""
    k = torch.tensor([[1.0, 0.0]]).repeat(810, 1)
    k[400:] = torch.tensor([0.0, 1.0])
    k = k[None, :, None].requires_grad_()
    q = torch.tensor([0.0, 1.0]).expand(1, 810, 1, 2)
    decays = torch.full((1, 810, 1), log_decay, requires_grad=True)
    out = mbd.filter_sequence(
        mbd.HiddenMarkov(), q, k, torch.ones(1, 810, 1, 1), log_decay=decays, method=method, return_evidence=True
    )
    assert out.output[0, 399].item() < 1e-2
    assert out.output[0, -1].item() > 0.99
    out.log_evidence.sum().backward()
    assert k.grad.isfinite().all()
    assert decays.grad.isfinite().all()
    if log_decay == 0:  # the sum over the two constant paths
        assert abs(out.log_evidence.item() - (410 + math.log1p(math.exp(-10)) - math.log(2))) < 1e-3


def test_without_jumps_it_is_linear_attention_through_a_softmax():
    problem = random_problem(mbd.HiddenMarkov(), T=20)
    out = mbd.filter_sequence(problem.design, problem.q, problem.k, problem.v, log_decay=0.0)
    logits = torch.einsum("bthd,bthm->bthdm", problem.k, problem.v).cumsum(1)
    assert_close(out.output, torch.einsum("bthd,bthdm->bthm", problem.q, logits.softmax(-2)), 1e-12)


def test_a_state_that_is_no_distribution_is_refused():
    problem = random_problem(mbd.HiddenMarkov())
    with pytest.raises(ValueError, match=r"initial\.log_belief: expected columns whose probabilities sum to 1"):
        problem.filter(initial=mbd.StateBelief(problem.prior().log_belief + 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mbd.CountMemory(events=0.0), r"^CountMemory\(events\): expected a finite number above 0, got 0.0"),
        (lambda: mbd.CountMemory(exposure=math.inf), r"^CountMemory\(exposure\): expected a finite number"),
        (lambda: mbd.CategoricalMemory("1"), r"^CategoricalMemory\(concentration\): expected a finite number"),
    ],
)
def test_bad_priors_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layer_reads_distributions_over_categories():
    torch.manual_seed(0)
    layer = mbd.MemoryLayer(mbd.CategoricalMemory(), hidden_size=32, num_heads=2, head_dim=8)
    inputs, _ = layer.step_inputs(torch.randn(2, 9, 32), None, None)
    assert_close(inputs.v.sum(-1), torch.ones(2, 9, 2), 1e-6)
    out = mbd.filter_sequence(layer.design, inputs.q, inputs.k, inputs.v, **inputs.parameters)
    assert_close(out.output.sum(-1), torch.ones(2, 9, 2), 1e-6)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_model_trains_generates_and_loads(name, tmp_path):
    torch.manual_seed(0)
    config = MemoryConfig(vocab_size=16, hidden_size=32, num_heads=2, layers=[name, name], tie_word_embeddings=False)
    model = MemoryForCausalLM(config)
    ids = torch.arange(24).remainder(6).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    model.eval()
    prompt, options = ids[:1, :7], {"max_new_tokens": 12, "do_sample": False}
    cached = model.generate(prompt, **options)
    assert torch.equal(cached, model.generate(prompt, **options, use_cache=False))
    assert torch.equal(cached[0], torch.arange(19).remainder(6))
    model.save_pretrained(tmp_path)
    loaded = MemoryForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
