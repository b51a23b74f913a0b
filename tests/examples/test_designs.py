"""examples/designs/: four designs that a user could have written, held to what the library promises for any design."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import ast
import math
import sys

import pytest
import torch

import membydesign as mbd
import membydesign.layers
import membydesign.models
from examples.own_designs import DESIGNS, FILES, blocks, counts, rwkv7, student_t
from membydesign.testing import DesignContract, assert_close, random_problem


class TestFiles:
    def test_there_are_four(self):
        names = [file.name for file in FILES]
        assert names == ["block_diagonal.py", "count_memory.py", "rwkv7_transition.py", "student_t_write.py"]

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_at_most_120_lines(self, file):
        assert len(file.read_text().splitlines()) <= 120

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_only_public_names(self, file):
        """From the package itself, and without underscores; nothing runs on import but definitions."""
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert all(alias.name in ("torch", "math") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module not in ("torch", *sys.stdlib_module_names):
                if node.module != "collections.abc":
                    assert node.module == "membydesign"
                    assert {alias.name for alias in node.names} <= set(mbd.__all__)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                assert isinstance(node.value, ast.Name)
                assert node.value.id == "self"
        assert ast.get_docstring(tree)
        allowed = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.If, ast.Expr)
        assert all(isinstance(node, allowed) for node in tree.body)
        assert sum(isinstance(node, ast.Expr) for node in tree.body) == 1


class TestStudentTWrite(DesignContract):
    design = DESIGNS["student_t"]
    linear_in_values = False


class TestStudentTWriteOfGroups(DesignContract):
    design = mbd.DesignModel(mbd.ScalarDecay(), student_t.StudentTWrite(nu=2.5, groups=2), mbd.Dense())
    linear_in_values = False


class TestBlockDiagonal(DesignContract):
    design = DESIGNS["blocks"]


class TestBlockDiagonalInChunks(DesignContract):
    design = mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(groups=2), blocks.BlockDiagonal(2, prior=0.7))
    method = "chunk"
    chunk_size = 3


class TestBlockDiagonalNative(DesignContract):
    design = DESIGNS["blocks"]
    method = "chunk"
    backend = "native"


class TestRWKV7Transition(DesignContract):
    design = DESIGNS["rwkv7_by_hand"]


class TestRWKV7TransitionNative(DesignContract):
    design = DESIGNS["rwkv7_by_hand"]
    method = "chunk"
    backend = "native"


class TestRWKV7TransitionObserved(DesignContract):
    """With a write that observes memory and a covariance: the exact filter of the same transition."""

    design = mbd.DesignModel(rwkv7.RWKV7Transition(), mbd.ObserveMemory(), mbd.Dense())


class TestCountMemory(DesignContract):
    design = counts.CountMemory(events=0.5, exposure=2.0)
    linear_in_values = False

    def oracle(self, problem):
        """The conjugate posterior from sums over the whole history; no recursion."""
        k, v, q = problem.k, problem.v, problem.q
        log_decay = problem.parameters["log_decay"]
        T, prior = k.shape[1], self.design
        outputs, evidence = [], torch.zeros(k.shape[0], k.shape[2], dtype=k.dtype)
        for t in range(T):
            # what a token s ≤ t has left at t, [B,t+1,H], and what the prior has left, [B,H]
            left = torch.stack([log_decay[:, s + 1 : t + 1].sum(1).exp() for s in range(t + 1)], 1)
            of_prior = log_decay[:, : t + 1].sum(1).exp()
            earlier = slice(0, t)
            a = torch.einsum("bsh,bshd,bshm->bhdm", left[:, earlier], k[:, earlier], v[:, earlier])
            a = a + (prior.events * of_prior)[..., None, None]
            b = torch.einsum("bsh,bshd->bhd", left[:, earlier], k[:, earlier]) + (prior.exposure * of_prior)[..., None]
            exposure, counted = k[:, t, :, :, None], torch.einsum("bhd,bhm->bhdm", k[:, t], v[:, t])
            success = exposure / (b[..., None] + exposure)
            predictive = torch.distributions.NegativeBinomial(a, success, validate_args=False)
            evidence = evidence + predictive.log_prob(counted).sum((-2, -1))
            outputs.append(torch.einsum("bhd,bhdm->bhm", q[:, t], (a + counted) / (b + k[:, t])[..., None]))
        return torch.stack(outputs, 1), evidence


def test_heavy_tails_in_the_limit_are_gaussian():
    gaussian = mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), mbd.Dense())
    problem = random_problem(mbd.DesignModel(mbd.DiagonalDecay(), student_t.StudentTWrite(nu=1e9), mbd.Dense()))
    ours = problem.filter(return_evidence=True, return_variance=True)
    reference = mbd.filter_sequence(
        gaussian, problem.q, problem.k, problem.v, **problem.parameters, return_evidence=True, return_variance=True
    )
    assert_close(ours.output, reference.output, 1e-6)
    assert_close(ours.variance, reference.variance, 1e-6)
    assert_close(ours.log_evidence, reference.log_evidence, 1e-5)


def test_an_outlier_hardly_moves_a_robust_memory():
    robust, gaussian = DESIGNS["student_t"], mbd.catalogue["bayesian_layer"]
    q = k = torch.ones(1, 20, 1, 1)
    v = torch.ones(1, 20, 1, 1)
    v[:, 10] = 100.0
    parameters = {"log_decay": 0.0, "process_noise": 0.001, "write_noise": 0.1}
    error = [
        (mbd.filter_sequence(design, q, k, v, **parameters).output - 1).abs()[:, 10:].max()
        for design in (robust, gaussian)
    ]
    assert error[0] < 0.05 < 2 < error[1]


def test_the_density_of_a_student_t_write_integrates_to_one():
    grid = torch.linspace(-400, 400, 400_001, dtype=torch.float64)[:, None, None]
    step = mbd.Step({"write_noise": torch.full((len(grid), 1, 1), 0.5, dtype=torch.float64)}, grid)
    variance = torch.full_like(grid, 0.7)
    density = student_t.StudentTWrite(nu=4).observe(torch.zeros_like(grid), variance, grid, step).log_density.exp()
    assert abs(torch.trapezoid(density[:, 0], grid[:, 0, 0]).item() - 1) < 1e-6


def test_blocks_are_what_is_kept():
    design = DESIGNS["blocks"]
    out = random_problem(design).filter(return_variance=True)
    assert type(out.belief) is blocks.BlockBelief
    assert out.belief.covariance.shape == (2, 2, 1, 2, 2, 2)
    P = out.belief.dense_covariance()
    assert_close(blocks.extract(P, 2), out.belief.covariance, 0)
    assert P[..., :2, 2:].abs().max() == 0
    q = torch.randn(2, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(out.belief.variance(q), torch.einsum("bhi,bhgij,bhj->bhg", q, P, q), 1e-12)


@pytest.mark.parametrize(("size", "covariance"), [(1, mbd.Diagonal(0.6)), (4, mbd.Dense(0.6))])
def test_blocks_lie_between_diagonal_and_dense(size, covariance):
    problem = random_problem(mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), blocks.BlockDiagonal(size, 0.6)))
    reference = mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), covariance)
    expected = mbd.filter_sequence(reference, problem.q, problem.k, problem.v, **problem.parameters)
    assert_close(problem.filter().output, expected.output, 1e-12)


def test_blocks_refuse_rows_that_they_cannot_cut():
    design = mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), blocks.BlockDiagonal(size=3))
    with pytest.raises(ValueError, match="^q: expected D divisible by the block size 3, got D = 4"):
        random_problem(design, D=4).filter()
    with pytest.raises(ValueError, match="^head_dim: expected D divisible by the block size 3, got 16"):
        mbd.MemoryLayer(design, 32, 2, 16)


@pytest.mark.parametrize("name", ["blocks", "rwkv7_by_hand"])
def test_native_code_runs_it(name):
    """backend="native" raises where no kernel can, and never falls back."""
    problem = random_problem(DESIGNS[name], T=40, D=8)
    native = problem.filter(backend="native")
    assert_close(native.output, problem.filter(method="recurrent").output, 1e-10)


@pytest.mark.parametrize("name", ["student_t", "counts"])
def test_no_kernel_runs_it_and_the_reason_is_told(name):
    with pytest.raises(ValueError, match="^backend: expected .* for (StudentTWrite|Count memory), since"):
        random_problem(DESIGNS[name]).filter(backend="native")


@pytest.mark.parametrize("options", [{"method": "recurrent"}, {"backend": "torch"}, {"backend": "native"}])
def test_rwkv7_by_hand_is_that_of_the_library(options):
    problem = random_problem(DESIGNS["rwkv7_by_hand"], T=30, D=8)
    own = dict(problem.parameters)
    retention, key, rate = own.pop("retention"), own.pop("erase_key"), own.pop("erase_rate")
    key = key / key.norm(dim=-1, keepdim=True)
    design = mbd.DesignModel(mbd.DecayAndRemoval(), mbd.LatentInput(), mbd.MeanOnly())
    expected = mbd.filter_sequence(
        design, problem.q, problem.k, problem.v, log_decay=retention.log(), removal_key=key, removal=rate * key, **own
    )
    ours = problem.filter(**options)
    assert_close(ours.output, expected.output, 1e-11)
    assert_close(ours.belief.mean, expected.belief.mean, 1e-11)


def test_a_row_that_retains_nothing_runs_too():
    problem = random_problem(DESIGNS["rwkv7_by_hand"])
    problem.parameters["retention"][:, 3, :, 1] = 0.0
    assert_close(problem.filter().output, problem.filter(method="recurrent").output, 0)


def test_counts_of_one_hot_keys_are_negative_binomial():
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(0, 3, (1, 12, 1), generator=generator)
    k = torch.nn.functional.one_hot(slots, 3).double()
    v = torch.randint(0, 6, (1, 12, 1, 2), generator=generator).double()
    design = counts.CountMemory(events=0.5, exposure=2.0)
    out = mbd.filter_sequence(design, k, k, v, log_decay=0.0, return_evidence=True)
    events, exposure = torch.full((3, 2), 0.5), torch.full((3, 1), 2.0)
    for t, i in enumerate(slots.flatten().tolist()):
        predictive = torch.distributions.NegativeBinomial(events[i].double(), (1 / (exposure[i] + 1)).double())
        assert_close(out.write_log_evidence[0, t, 0], predictive.log_prob(v[0, t, 0]).sum(), 1e-6)
        events[i] += v[0, t, 0]
        exposure[i] += 1
        assert_close(out.output[0, t, 0].float(), events[i] / exposure[i], 1e-6)


def test_counts_are_a_joint_density_of_all_writes():
    """Sequential evidence is ∫ Gamma(λ) Π Poisson(n_t | k_t λ) dλ, by quadrature, for one slot and one column."""
    n, k = torch.tensor([2.0, 0.0, 3.0]).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    out = mbd.filter_sequence(
        counts.CountMemory(events=1.5, exposure=2.0),
        *(x[None, :, None, None] for x in (k, k, n / k)),
        log_decay=0.0,
        return_evidence=True,
    )
    rate = torch.linspace(1e-9, 40, 400_001, dtype=torch.float64)
    log_joint = torch.distributions.Gamma(1.5, torch.tensor(2.0).double()).log_prob(rate)
    for n_t, k_t in zip(n, k, strict=True):
        log_joint = log_joint + torch.distributions.Poisson(k_t * rate).log_prob(n_t)
    assert abs(out.log_evidence.item() - torch.trapezoid(log_joint.exp(), rate).log().item()) < 1e-6


def test_counts_refuse_negative_keys_and_values():
    problem = random_problem(counts.CountMemory())
    for name in ("q", "k", "v"):
        arguments = {x: getattr(problem, x) for x in ("q", "k", "v")} | {name: -getattr(problem, name)}
        with pytest.raises(ValueError, match=f"^{name}: expected values >= 0"):
            mbd.filter_sequence(problem.design, **arguments, log_decay=0.0)


def test_an_unwritten_slot_is_read_as_the_prior():
    one = torch.tensor([1.0, 0.0])[None, None, None]
    other = torch.tensor([0.0, 1.0])[None, None, None]
    out = mbd.filter_sequence(counts.CountMemory(3.0, 2.0), other, one, one, log_decay=-0.1, return_variance=True)
    assert_close(out.output, torch.full((1, 1, 1, 2), 1.5), 1e-6)
    assert out.variance.shape == (1, 1, 1, 2)
    assert math.isclose(out.variance[0, 0, 0, 0].item(), 3 / 4 * math.exp(0.1), rel_tol=1e-5)
