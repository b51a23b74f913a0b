"""A call that fails or is interrupted leaves the cache that it was passed as it was: a retry gives the same bits."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

from membydesign.models import MemoryCache
from models.family import FAMILY, KINDS, cases, fresh_model, padded_batch, some_ids

ERRORS = [RuntimeError, KeyboardInterrupt]
SMALL = ["bayesian_layer", "bayesian_layer+attention", "bayesian_layer+gated_deltanet+mamba2"]


class FailsAt:
    """A hook that raises at its n-th call, and never again."""

    def __init__(self, n, error):
        self.left, self.error = n, error

    def __call__(self, *_args):
        self.left -= 1
        if self.left == 0:
            raise self.error("in the middle of it")


def contents(cache):
    """Copies of all that a cache holds."""
    return [
        (layer.get_seq_length(), layer.is_initialized, layer.batch_size)
        + (
            ()
            if layer.belief is None
            else tuple((name, x.detach().clone(), x.requires_grad) for name, x in layer.belief.parts())
        )
        for layer in cache.layers
    ]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[:3] == theirs[:3]
        for (name, x, grad), (other, y, wanted) in zip(ours[3:], theirs[3:], strict=True):
            assert (name, grad) == (other, wanted)
            assert torch.equal(x, y), name


def places(model):
    """Modules of a model, by name, where a call may be interrupted: after a mixer, after a block, after the blocks."""
    mixers = [(f"mixer {i}", block.mixer) for i, block in enumerate(model.model.layers)]
    blocks = [(f"block {i}", block) for i, block in enumerate(model.model.layers)]
    return [*mixers, *blocks, ("norm", model.model.norm), ("model", model.model), ("head", model.lm_head)]


@pytest.mark.parametrize("error", ERRORS)
@cases(quick=KINDS)
@torch.no_grad()
def test_a_token_that_failed_anywhere_is_retried_to_the_same_bits(case, error):
    model, ids = fresh_model(FAMILY[case]), some_ids(2, 9)
    start = model(ids[:, :6]).past_key_values
    clean = copy.deepcopy(start)
    expected = [model(ids[:, t : t + 1], past_key_values=clean).logits for t in (6, 7, 8)]
    for name, module in places(model):
        for n in (1, 2, 3):
            cache, got = copy.deepcopy(start), []
            hook = module.register_forward_hook(FailsAt(n, error))
            for i, t in enumerate((6, 7, 8)):
                before = contents(cache)
                if i + 1 == n:
                    with pytest.raises(error, match="in the middle of it"):
                        model(ids[:, t : t + 1], past_key_values=cache)
                    assert_same(contents(cache), before)
                got.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
            hook.remove()
            assert all(map(torch.equal, got, expected)), (name, n)
            assert_same(contents(cache), contents(clean))


@pytest.mark.parametrize("n", [1, 2, 3])
@torch.no_grad()
def test_every_block_call_that_fails_is_undone(n):
    """The n-th call of any block, counted over all of them: the first, second or third layer of one token."""
    model, ids = fresh_model(["bayesian_layer", "attention", "gated_deltanet"]), some_ids(1, 8)
    cache = model(ids[:, :7]).past_key_values
    expected = model(ids[:, 7:], past_key_values=copy.deepcopy(cache)).logits
    fails = FailsAt(n, RuntimeError)
    hooks = [block.register_forward_pre_hook(fails) for block in model.model.layers]
    with pytest.raises(RuntimeError, match="in the middle of it"):
        model(ids[:, 7:], past_key_values=cache)
    for hook in hooks:
        hook.remove()
    assert cache.get_seq_length() == 7
    assert torch.equal(model(ids[:, 7:], past_key_values=cache).logits, expected)


@torch.no_grad()
def test_an_empty_cache_stays_empty():
    model, ids = fresh_model(), some_ids(2, 6)
    cache = MemoryCache(2)
    hook = model.model.layers[1].register_forward_hook(FailsAt(1, RuntimeError))
    with pytest.raises(RuntimeError):
        model(ids, past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 0
    assert [layer.belief for layer in cache.layers] == [None, None]
    assert not any(layer.is_initialized for layer in cache.layers)


@torch.no_grad()
def test_a_padded_piece_that_failed_is_undone():
    model = fresh_model(["bayesian_layer", "attention"])
    ids, mask = padded_batch([some_ids(4), some_ids(7, seed=2)])
    more, seen = some_ids(2, 3, seed=4), torch.nn.functional.pad(mask, (0, 3), value=1)
    cache = model(ids, mask).past_key_values
    expected = model(more, seen, past_key_values=copy.deepcopy(cache)).logits
    hook = model.model.layers[1].register_forward_pre_hook(FailsAt(1, KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(more, seen, past_key_values=cache)
    hook.remove()
    assert torch.equal(model(more, seen, past_key_values=cache).logits, expected)


def test_refused_labels_and_overflowing_logits_leave_the_cache():
    """Both show only after all layers have run."""
    model, ids = fresh_model(), some_ids(2, 6)
    cache = model(ids[:, :5]).past_key_values
    before = contents(cache)
    with pytest.raises(ValueError, match="labels: expected one for each of the logits"):
        model(ids[:, 5:], past_key_values=cache, labels=ids)
    assert_same(contents(cache), before)
    with torch.no_grad():
        model.lm_head.weight[0] = float("inf")
    with pytest.raises(ArithmeticError, match="lm_head"):
        model(ids[:, 5:], past_key_values=cache)
    assert_same(contents(cache), before)


OPTIONS: list[dict[str, int]] = [{}, {"num_beams": 3}]
if Version(transformers.__version__) >= Version("5.22"):  # older ones are refused chunks after a filled cache
    OPTIONS.append({"prefill_chunk_size": 2})


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("case", SMALL)
def test_generation_that_failed_is_retried_to_the_same_tokens(case, options, error):
    model, ids = fresh_model(FAMILY[case]), some_ids(2, 9)
    rows = options.get("num_beams", 1)
    with torch.no_grad():
        start = model(ids[:, :5]).past_key_values
    start.batch_repeat_interleave(rows)
    greedy = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0, **options}
    expected = model.generate(ids, past_key_values=copy.deepcopy(start), **greedy)
    for n in (1, 2, 4):
        cache = copy.deepcopy(start)
        hook = model.model.layers[-1].register_forward_hook(FailsAt(n, error))
        with pytest.raises(error, match="in the middle of it"):
            model.generate(ids, past_key_values=cache, **greedy)
        hook.remove()
        assert_same(contents(cache), contents(start))
        assert model.generate(ids, past_key_values=cache, **greedy).equal(expected)


CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "detach": lambda cache: cache.detach(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_all_layers_takes_effect_in_all_or_none(change, monkeypatch):
    """Beams that are reordered in one layer and not in the next would mix sequences."""
    model = fresh_model(["bayesian_layer", "attention"])
    cache = model(some_ids(2, 5)).past_key_values
    before = contents(cache)
    kind, fails = type(cache.layers[1].belief), FailsAt(1, KeyboardInterrupt)
    real = kind.map
    monkeypatch.setattr(kind, "map", lambda self, f: (fails(), real(self, f))[1])
    with pytest.raises(KeyboardInterrupt):
        CHANGES[change](cache)
    assert_same(contents(cache), before)
    CHANGES[change](cache)
    assert cache.layers[0].batch_size == cache.layers[1].batch_size


@cases(quick=KINDS)
@torch.no_grad()
def test_layers_leave_the_belief_that_they_are_passed(case):
    """So a state of several parts (memory, tails of convolutions, keys and values) never changes by halves."""
    model, ids = fresh_model(FAMILY[case]), some_ids(2, 9)
    cache = model(ids[:, :4]).past_key_values
    kept = [layer.belief for layer in cache.layers]
    before = contents(cache)
    for start, end in ((4, 5), (5, 8), (8, 9)):
        model(ids[:, start:end], past_key_values=cache)
    for belief, row in zip(kept, before, strict=True):
        assert belief is not None
        for (name, x), (_, y, _) in zip(belief.parts(), row[3:], strict=True):
            assert torch.equal(x, y), name
