"""Variance and evidence as layers and models return them."""

import math
from typing import Any

import pytest
import torch
from torch.func import functional_call

import membydesign as mbd
from layers.contract import WIDTH, between, bounds, shaken, tokens
from membydesign.layers import MemoryLayer, make_layer
from membydesign.layers.parameters import LearnedParameter
from membydesign.models import MemoryConfig, MemoryForCausalLM
from membydesign.testing import assert_close

ASKS: Any = {"return_variance": True, "return_evidence": True}
GROUPED = mbd.catalogue["bayesian_layer"].replace(write=mbd.ObserveMemory(groups=3))
ROTATING = mbd.catalogue["bayesian_layer"].replace(transition=mbd.DampedRotation())
DESIGNS = {
    **{name: mbd.catalogue[name] for name in ("bayesian_layer", "bayesian_layer_diagonal", "gated_deltanet")},
    "grouped": GROUPED,
    "rotating": ROTATING,
}


@pytest.fixture(params=DESIGNS)
def layer(request) -> MemoryLayer:
    torch.manual_seed(0)
    made = MemoryLayer(DESIGNS[request.param], WIDTH, 2, 8, value_dim=6, short_convolution=3)
    shaken(made)
    return made.double()


def test_equals_the_loop_over_tokens_on_the_layers_own_inputs(layer):
    x = tokens(2, 21)
    y, belief, found = layer(x, **ASKS)
    inputs, _ = layer.step_inputs(x, None, None)
    wanted = mbd.filter_sequence(
        layer.design, inputs.q, inputs.k, inputs.v, **inputs.parameters, method="recurrent", **ASKS
    )
    assert_close(found.variance, wanted.variance, 1e-10)
    assert_close(found.log_evidence, wanted.write_log_evidence, 1e-9)
    assert found.variance.shape == (2, 21, 2, layer.design.write.groups)
    assert found.log_evidence.shape == (2, 21, 2)
    plain, same = layer(x)
    assert_close(y, plain, 1e-12)
    assert_close(belief.memory.mean, same.memory.mean, 1e-12)


def test_one_may_ask_for_either(layer):
    x = tokens(1, 5)
    _, _, both = layer(x, **ASKS)
    _, _, variance = layer(x, return_variance=True)
    _, _, evidence = layer(x, return_evidence=True)
    assert variance.log_evidence is None
    assert evidence.variance is None
    assert_close(variance.variance, both.variance, 1e-12)
    assert_close(evidence.log_evidence, both.log_evidence, 1e-12)


def test_token_by_token_is_the_whole(layer):
    x = tokens(2, 13)
    _, _, whole = layer(x, **ASKS)
    belief, variances, evidences = None, [], []
    for t in range(13):
        _, belief, found = layer(x[:, t : t + 1], belief, **ASKS)
        variances.append(found.variance)
        evidences.append(found.log_evidence)
    assert_close(torch.cat(variances, 1), whole.variance, 1e-9)
    assert_close(torch.cat(evidences, 1), whole.log_evidence, 1e-9)


def test_packed_is_separate(layer):
    pieces = [tokens(1, n, seed=n) for n in (6, 1, 11)]
    _, _, packed = layer(torch.cat(pieces, 1), cu_seqlens=bounds(pieces), **ASKS)
    for i, piece in enumerate(pieces):
        _, _, alone = layer(piece, **ASKS)
        assert_close(packed.variance[:, between(pieces, i)], alone.variance, 1e-9)
        assert_close(packed.log_evidence[:, between(pieces, i)], alone.log_evidence, 1e-9)


PRIOR, NOISE = 1.7, 0.3


def unfading(process_noise: float = 0.0) -> MemoryLayer:
    """A layer whose memory keeps what it has, and that asks with the key it writes with."""
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense(prior=PRIOR))
    torch.manual_seed(0)
    layer = MemoryLayer(design, WIDTH, 2, 8, process_noise=process_noise, write_noise=NOISE).double()
    layer.q_proj.weight = layer.k_proj.weight
    return layer


def test_a_key_written_n_times():
    """p₀r²/(r² + n p₀), as for the mean of n noisy measurements; and the density of the n-th measurement."""
    layer = unfading()
    _, _, found = layer(tokens(1, 1).expand(1, 9, WIDTH), **ASKS)
    n = torch.arange(1, 10, dtype=torch.float64)
    assert_close(found.variance[0, :, :, 0], (PRIOR * NOISE / (NOISE + n * PRIOR))[:, None].expand(9, 2), 1e-5)

    v = layer.v_proj(tokens(1, 1)).view(2, 8)
    seen = n - 1
    mean = (seen * PRIOR / (NOISE + seen * PRIOR))[:, None, None] * v
    std = (NOISE + PRIOR * NOISE / (NOISE + seen * PRIOR)).sqrt()
    density = torch.distributions.Normal(mean, std[:, None, None].expand_as(mean)).log_prob(v.expand_as(mean))
    assert_close(found.log_evidence[0], density.sum(-1), 1e-4)


def test_a_direction_never_written_keeps_the_prior_and_gathers_noise():
    layer = unfading(process_noise=0.05)
    axes = torch.eye(8, dtype=torch.float64)
    key, query = torch.zeros(2, 8, WIDTH, dtype=torch.float64), torch.zeros(2, 8, WIDTH, dtype=torch.float64)
    key[:, :, 0] = key[:, :, 1] = query[:, :, 0] = axes[0]  # both tokens write along the first axis,
    query[:, :, 1] = axes[1]  # and the second token asks along the second
    layer.k_proj.weight, layer.q_proj.weight = (
        torch.nn.Parameter(key.flatten(0, 1)),
        torch.nn.Parameter(query.flatten(0, 1)),
    )
    x = torch.eye(WIDTH, dtype=torch.float64)[[0] * 10 + [1]][None]
    _, _, found = layer(x, return_variance=True)
    assert_close(found.variance[0, -1, :, 0], torch.full((2,), PRIOR + 11 * 0.05, dtype=torch.float64), 1e-5)
    assert (found.variance[0, :10] < NOISE).all()


def test_variance_lies_between_zero_and_prior_with_noise():
    layer = unfading(process_noise=0.01)
    _, _, found = layer(tokens(3, 50), return_variance=True)
    assert (found.variance > 0).all()
    assert (found.variance <= PRIOR + 0.01 * torch.arange(1, 51)[:, None, None]).all()


def test_evidence_tells_a_rehearsal_from_an_update():
    layer = unfading()
    with torch.no_grad():
        layer.k_proj.weight[:, 1:] = 0  # keys see the first feature, values the others
    x = tokens(1, 1).repeat(1, 5, 1)
    x[..., 0] = 1
    updated = x.clone()
    updated[:, -1, 1:] += 3
    _, _, rehearsal = layer(x, return_evidence=True)
    _, _, update = layer(updated, return_evidence=True)
    assert_close(update.log_evidence[:, :4], rehearsal.log_evidence[:, :4], 1e-12)
    assert (update.log_evidence[:, 4] < rehearsal.log_evidence[:, 4] - 1).all()
    assert (rehearsal.log_evidence.diff(dim=1) > 0).all()


@pytest.mark.parametrize("design", ["bayesian_layer", "bayesian_layer_diagonal"])
def test_gradients(design):
    torch.manual_seed(0)
    layer = MemoryLayer(design, 4, 2, 2, short_convolution=2)
    shaken(layer)
    layer.double()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)

    def of(x, *values):
        _, _, found = functional_call(layer, dict(zip(names, values, strict=True)), (x,), ASKS)
        return found.variance, found.log_evidence

    assert torch.autograd.gradcheck(of, (x, *parameters), atol=1e-6)


def test_a_loss_of_variance_and_evidence_reaches_what_they_depend_on():
    torch.manual_seed(0)
    layer = shaken(make_layer("bayesian_layer", WIDTH, num_heads=2, head_dim=8, short_convolution=3))
    _, _, found = layer(tokens(2, 9, dtype=torch.float32), **ASKS)
    (found.variance.mean() - found.log_evidence.mean()).backward()
    still = {name for name, p in layer.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)}
    assert still == {"g_proj.weight", "o_norm.weight", "o_proj.weight"}  # what follows the read


def small_model(*layers: str) -> MemoryForCausalLM:
    torch.manual_seed(0)
    options = {name: {"short_convolution": 3} for name in set(layers)}
    config = MemoryConfig(
        vocab_size=30, hidden_size=16, layers=list(layers), num_heads=2, head_dim=6, layer_options=options
    )
    return MemoryForCausalLM(config).double().eval()


def test_a_model_returns_what_its_layers_return():
    model = small_model("bayesian_layer", "bayesian_layer")
    ids = torch.randint(30, (2, 12))
    out = model(ids, output_hidden_states=True, **ASKS)
    for i, block in enumerate(model.model.layers):
        _, _, found = block.mixer(block.mixer_norm(out.hidden_states[i]), **ASKS)  # pyright: ignore[reportCallIssue]
        assert_close(out.variances[i], found.variance, 1e-10)
        assert_close(out.log_evidences[i], found.log_evidence, 1e-10)
    plain = model(ids)
    assert plain.variances is None
    assert plain.log_evidences is None


def test_a_layer_without_covariance_has_no_variance():
    out = small_model("bayesian_layer", "linear_attention_style")(torch.randint(30, (2, 7)), **ASKS)
    assert out.variances[0].shape == (2, 7, 2, 1)
    assert out.variances[1] is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_matter_and_comes_back_as_zeros(side):
    model = small_model("bayesian_layer", "bayesian_layer")
    rows = [torch.randint(30, (n,)) for n in (9, 4, 7)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True, padding_side=side)
    out = model(ids, attention_mask=mask, **ASKS)
    packed = model(torch.cat(rows)[None], cu_seqlens=torch.tensor([0, 9, 13, 20]), **ASKS)
    for padded, in_one_row in ((out.variances, packed.variances), (out.log_evidences, packed.log_evidences)):
        for layer, wanted in zip(padded, in_one_row, strict=True):
            assert_close(layer[mask.bool()], wanted[0], 1e-9)
            assert (layer[~mask.bool()] == 0).all()
    alone = model(rows[1][None], **ASKS)
    assert_close(out.variances[1][1][mask[1].bool()], alone.variances[1][0], 1e-9)


def test_a_model_token_by_token_with_a_cache():
    model = small_model("bayesian_layer", "bayesian_layer")
    ids = torch.randint(30, (2, 8))
    whole = model(ids, **ASKS)
    cache, variances, evidences = None, [], []
    for t in range(8):
        out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True, **ASKS)
        cache = out.past_key_values
        variances.append(out.variances[1])
        evidences.append(out.log_evidences[1])
    assert_close(torch.cat(variances, 1), whole.variances[1], 1e-9)
    assert_close(torch.cat(evidences, 1), whole.log_evidences[1], 1e-9)


def test_evidence_trains_noise_to_what_the_values_have():
    """Maximum likelihood by the layer's own evidence: write noise goes to the variance that writes really have."""
    design = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense(prior=1e-6))
    torch.manual_seed(0)
    layer = MemoryLayer(design, 8, 1, 8, process_noise=0.0).double()
    with torch.no_grad():
        layer.v_proj.weight.copy_(0.3 * torch.eye(8))
    x = torch.randn(4, 200, 8, dtype=torch.float64)
    noise = layer.noises["write_noise"]
    assert isinstance(noise, LearnedParameter)
    optimizer = torch.optim.Adam([noise.bias], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        _, _, found = layer(x, return_evidence=True)
        (-found.log_evidence.mean()).backward()
        optimizer.step()
    assert math.isclose(noise(x).mean().item(), 0.09, rel_tol=0.05)


def test_a_learned_variance_has_no_floor_if_it_is_told_so():
    x = torch.zeros(1, 3, 4)
    kept = LearnedParameter("process_noise", mbd.Learned(1e-3), 4, (2,), ">= 0")
    free = LearnedParameter("process_noise", mbd.Learned(1e-5, floor=0), 4, (2,), ">= 0")
    for noise, start in ((kept, 1e-3), (free, 1e-5)):
        torch.testing.assert_close(noise(x), torch.full((1, 3, 2), start), rtol=1e-5, atol=0)
    with torch.no_grad():
        kept.bias.fill_(-40.0)
        free.bias.fill_(-40.0)
    assert (kept(x) == 1e-4).all()
    torch.testing.assert_close(free(x), torch.full((1, 3, 2), -40.0).exp())


def test_a_floor_is_stated_in_json_and_checked():
    layer: Any = make_layer("bayesian_layer", 8, 2, 4, process_noise={"learned": 1e-5, "floor": 0})
    torch.testing.assert_close(layer.noises["process_noise"](torch.zeros(1, 1, 8)), torch.full((1, 1, 2), 1e-5))
    with pytest.raises(ValueError, match=r"Learned\(initial\): expected a variance above 0\.0001, got 1e-05"):
        make_layer("bayesian_layer", 8, 2, 4, process_noise={"learned": 1e-5})
    with pytest.raises(ValueError, match=r"Learned\(floor\): expected at least 0, got -1\.0"):
        mbd.Learned(0.05, floor=-1.0)
