"""Accelerated Transformers models against the same models left alone."""

import copy
import inspect
import sys
from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from integrations.tiny_models import FIVE, OTHERS, tiny, tokens
from membydesign.integrations.transformers import accelerate
from membydesign.integrations.transformers.acceleration import LAYERS, REPLACEMENTS

SLOW_OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in OTHERS]

TOLERANCE = 1e-4
"""Of logits and gradients in float32, relative to their largest entry."""


def close(ours, theirs, tolerance=TOLERANCE):
    scale = theirs.abs().max().item()
    assert scale > 0
    assert (ours - theirs).abs().max().item() <= tolerance * scale


def logits_and_gradients(model, ids, **inputs):
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False, **inputs)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs):
    close(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        if gradient.abs().max() > 1e-7:
            close(ours[1][name], gradient)
    layers = [name for name in theirs[1] if "A_log" in name or "dt_bias" in name]
    assert layers
    assert all(theirs[1][name].abs().max() > 0 for name in layers), "the recurrence must take part"


def cache_of(out):
    return {"cache_params": out.cache_params} if "cache_params" in out else {"past_key_values": out.past_key_values}


@pytest.fixture
def counted(monkeypatch):
    """Count the native sequences and steps, so that a fallback is noticed."""
    from membydesign.integrations.transformers import delta_rule, state_space

    counts = {"sequences": 0, "steps": 0}

    def counting(kind, function):
        def wrapped(*args, **kwargs):
            result = function(*args, **kwargs)
            counts[kind] += result is not None and result is not NotImplemented
            return result

        return wrapped

    for module in (delta_rule, state_space):
        monkeypatch.setattr(module, "mean_pass", counting("sequences", module.mean_pass))
    monkeypatch.setattr(delta_rule, "native_step", counting("steps", delta_rule.native_step))
    name = "mamba2_selective_state_update"
    step = REPLACEMENTS[name]._replace(function=counting("steps", state_space.state_update))
    monkeypatch.setitem(REPLACEMENTS, name, step)
    return counts


@pytest.mark.parametrize("family", [*FIVE, *OTHERS])
@pytest.mark.parametrize("training", [False, True])
def test_logits_and_gradients(family, training, counted):
    model, ids = tiny(family).train(training), tokens(2, 37)
    theirs = logits_and_gradients(model, ids)
    with accelerate(model) as acceleration:
        ours = logits_and_gradients(model, ids)
    assert counted["sequences"] == len(acceleration.layers) > 0
    same(ours, theirs)


@pytest.mark.parametrize("family", [*FIVE, *SLOW_OTHERS])
def test_left_padding(family):
    model, ids = tiny(family), tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0

    def run():
        model.zero_grad()
        logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        logits.logsumexp(-1).sum().backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    theirs = run()
    with accelerate(model):
        same(run(), theirs)


@pytest.mark.parametrize("family", [*FIVE, *SLOW_OTHERS])
@torch.no_grad()
def test_prefill_in_pieces_and_decoding(family, counted):
    model, ids = tiny(family), tokens(2, 30)

    def run(*pieces):
        cache, logits = {}, []
        for piece in ids.split(pieces, 1):
            out = model(piece, use_cache=True, **cache)
            cache = cache_of(out)
            logits.append(out.logits)
        return torch.cat(logits, 1)

    theirs, whole = run(11, 16, 1, 1, 1), model(ids, use_cache=False).logits
    if family in FIVE:  # some of the others' own attention does not see all of the cache in a later piece
        close(theirs, whole, 1e-3)
    with accelerate(model) as acceleration:
        close(run(11, 16, 1, 1, 1), theirs)
    assert counted == {"sequences": 2 * len(acceleration.layers), "steps": 3 * len(acceleration.layers)}


@pytest.mark.parametrize("family", FIVE)
def test_packed_sequences_equal_separate_ones(family):
    """Transformers refuses packing on a CPU; the reference is each sequence alone in the unaccelerated model."""
    model, ids, bounds = tiny(family), tokens(1, 40), [0, 3, 20, 21, 40]
    lengths = [b - a for a, b in pairwise(bounds)]
    layout = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32),
        "seq_idx": torch.repeat_interleave(torch.arange(4, dtype=torch.int32), torch.tensor(lengths))[None],
    }

    def gradients(logits):
        model.zero_grad()
        (logits.softmax(-1)[..., 0].sum() * 10).backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def logits(ids, **layout):
        if family != "mamba2":
            return model(ids, use_cache=False, **layout).logits
        return model.lm_head(model.backbone(ids, use_cache=False, **layout)[0])  # Mamba2ForCausalLM drops the layout

    theirs = gradients(torch.cat([logits(part) for part in ids.split(lengths, 1)], 1))
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        logits(ids, **layout)
    with accelerate(model):
        same(gradients(logits(ids, **layout)), theirs)
        del layout["seq_idx" if family != "mamba2" else "cu_seq_lens_q"]  # either is enough
        same(gradients(logits(ids, **layout)), theirs)
        with pytest.raises(ValueError, match="expected increasing boundaries from 0 to 39"):
            logits(ids[:, 1:], **{**layout, "position_ids": torch.arange(39)[None]})


@pytest.mark.parametrize("family", FIVE)
def test_200_tokens_are_the_same(family, counted):
    """Sampled, since greedy text of an untrained model soon repeats one token; and from a padded batch."""
    model, ids = tiny(family), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def run():
        torch.manual_seed(7)
        return model.generate(ids, attention_mask=mask, max_new_tokens=200, do_sample=True, pad_token_id=0)

    theirs = run()
    with accelerate(model) as acceleration:
        ours = run()
    assert ours.shape == (2, 212)
    assert ours.unique().numel() > 40
    assert torch.equal(ours, theirs)
    assert counted["steps"] == 199 * len(acceleration.layers)


@pytest.mark.parametrize("family", FIVE)
def test_bfloat16(family):
    model, ids = tiny(family).bfloat16(), tokens(2, 24)
    with torch.no_grad():
        theirs = model(ids, use_cache=False).logits
        with accelerate(model):
            ours = model(ids, use_cache=False).logits
    assert ours.dtype == theirs.dtype
    close(ours.float(), theirs.float(), 0.05)


def test_gradient_checkpointing():
    model, ids = tiny("qwen3_5").train(), tokens(2, 19)
    theirs = logits_and_gradients(model, ids)
    model.gradient_checkpointing_enable()
    with accelerate(model):
        same(logits_and_gradients(model, ids), theirs)


def functions(kind):
    """What the forward of a class and its module call by the names that are replaced."""
    forward = inspect.unwrap(kind.forward)
    names = {name for name in forward.__code__.co_names if name in REPLACEMENTS}
    module = vars(sys.modules[kind.__module__])
    return {"forward": kind.forward, **{name: (forward.__globals__[name], module[name]) for name in names}}


@pytest.mark.parametrize("family", [*FIVE, *OTHERS])
def test_removal_restores_the_originals(family):
    model, other = tiny(family), tiny(family)
    layer = next(m for m in model.modules() if type(m).__name__ == LAYERS[family])
    kind, before = type(layer), functions(type(layer))
    handle = accelerate(model)
    assert layer.forward.__func__ is not kind.forward
    assert functions(kind) == before
    assert all("forward" not in vars(module) for module in other.modules())
    handle.remove()
    handle.remove()
    assert layer.forward.__func__ is kind.forward
    assert all("forward" not in vars(module) for module in model.modules())
    assert functions(kind) == before
    with pytest.raises(ZeroDivisionError), accelerate(model):
        raise ZeroDivisionError
    assert layer.forward.__func__ is kind.forward


def test_every_known_layer_is_of_this_version():
    for family, name in LAYERS.items():
        module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
        assert functions(getattr(module, name)).keys() >= {"causal_conv1d_fn", "causal_conv1d_update"}


def test_a_copy_is_accelerated_too_and_computes_with_its_own_weights():
    model, ids = tiny("qwen3_next"), tokens(1, 9)
    with accelerate(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.5)
        assert not torch.equal(twin(ids).logits, model(ids).logits)


def test_subnormal_numbers_are_as_before():
    """They are zero only while native code runs, forward and backward, whatever a program has set."""
    model, ids, small = tiny("qwen3_next"), tokens(1, 9), torch.tensor(1e-40)
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            with accelerate(model):
                logits_and_gradients(model, ids)
            assert ((small * 1).item() == 0) == flush
    finally:
        torch.set_flush_denormal(False)


def test_other_devices_take_the_original_functions():
    model = tiny("qwen3_next")
    with accelerate(model):
        assert model.to("meta")(tokens(1, 9).to("meta")).logits.is_meta


def test_what_is_refused(monkeypatch):
    model = tiny("qwen3_next")
    with pytest.raises(ValueError, match="model: expected a model of Transformers, got str"):
        accelerate("qwen")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"model: expected one with layers of qwen3_next, .* got Linear without any"):
        accelerate(torch.nn.Linear(2, 2))
    with accelerate(model), pytest.raises(ValueError, match=r"got model\.layers\.0\.linear_attn with another"):
        accelerate(model)
    with monkeypatch.context() as patch:
        patch.setattr(transformers, "__version__", "5.99.0")
        with pytest.raises(RuntimeError, match=r"transformers: expected version 5\.20 or .* 5\.23, .* got 5\.99\.0"):
            accelerate(model)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", lambda query, key: None)
    with pytest.raises(
        RuntimeError, match=r"torch_chunk_gated_delta_rule of .*: expected the arguments query, .*, got"
    ):
        accelerate(model)
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("tokens_", "bias"), [(1, False), (2, True), (75, True)])
def test_convolution_in_blocks_is_conv1d(tokens_, bias, activation, monkeypatch):
    """Blocks of 16 tokens, and fewer tokens than taps."""
    from membydesign.integrations.transformers import convolution

    monkeypatch.setattr(convolution, "BLOCK", 1)
    generator = torch.Generator().manual_seed(0)
    x, weight, b, d = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 6, tokens_), (6, 4), (6,), (2, 6, tokens_))
    )
    inputs = (x, weight, b) if bias else (x, weight)
    theirs = torch.nn.functional.conv1d(x, weight[:, None], b if bias else None, padding=3, groups=6)[..., :tokens_]
    theirs = theirs if activation is None else torch.nn.functional.silu(theirs)
    ours = convolution.convolve(x, weight, b if bias else None, activation)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    pairs = (torch.autograd.grad(y, inputs, d.detach()) for y in (ours, theirs))
    for mine, reference in zip(*pairs, strict=True):
        assert torch.allclose(mine, reference, rtol=0, atol=1e-11)
