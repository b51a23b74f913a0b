"""What every sequence layer must pass: derive from `LayerContract` and say how to make the layer."""

from itertools import pairwise

import pytest
import torch

from membydesign.layers import SequenceLayer
from membydesign.testing import assert_close

WIDTH = 24


def shaken(layer: SequenceLayer, seed: int = 0) -> SequenceLayer:
    """The layer with every parameter moved off its starting value, so that none is zero or like another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return layer


def tokens(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def in_pieces(layer: SequenceLayer, x: torch.Tensor, bounds: list[int]):
    outputs, belief = [], None
    for start, end in pairwise(bounds):
        y, belief = layer(x[:, start:end], belief)
        outputs.append(y)
    assert belief is not None
    return torch.cat(outputs, 1), belief


def assert_same_belief(found, wanted, tolerance=1e-9):
    assert type(found) is type(wanted)
    for (name, x), (other, y) in zip(found.parts(), wanted.parts(), strict=True):
        assert name == other
        if name.endswith("covariance.rows"):  # the factors of a covariance may be turned among each other
            x, y = x.mT @ x, y.mT @ y
        assert_close(x, y, tolerance, name)


def assert_same_tokens(found, wanted, tolerance=1e-9):
    """The same belief of a layer whose state grows: `found` may have empty places, zeros, before the first token."""
    assert type(found) is type(wanted)
    parts = dict(found.parts())
    lengths = parts.pop("lengths", None)  # of sequences that stand beside longer ones
    for name, y in wanted.parts():
        x = parts.pop(name)
        empty = x.shape[1] - y.shape[1]
        assert empty >= 0
        assert not x[:, :empty].any()
        assert lengths is None or lengths.tolist() == [y.shape[1]]
        assert_close(x[:, empty:], y, tolerance, name)
    assert not parts


class LayerContract:
    """Inherit as `class TestMine(LayerContract)` and define `make`."""

    def make(self) -> SequenceLayer:
        raise NotImplementedError

    @pytest.fixture
    def layer(self) -> SequenceLayer:
        torch.manual_seed(0)
        return shaken(self.make()).double()

    def test_token_by_token_is_the_whole(self, layer):
        x = tokens(2, 19)
        y, belief = layer(x)
        stepped, last = in_pieces(layer, x, list(range(20)))
        assert y.shape == x.shape
        assert_close(stepped, y, 1e-9)
        assert_same_belief(last, belief)

    def test_any_split_is_the_whole(self, layer):
        x = tokens(1, 40)
        y, belief = layer(x)
        generator = torch.Generator().manual_seed(2)
        for pieces in (2, 2, 3, 4, 5, 6):
            cuts = torch.randperm(39, generator=generator)[: pieces - 1].sort().values + 1
            split, last = in_pieces(layer, x, [0, *cuts.tolist(), 40])
            assert_close(split, y, 1e-9)
            assert_same_belief(last, belief)

    def test_packed_is_separate_also_when_resumed(self, layer):
        lengths = (7, 1, 2, 12)
        first = [tokens(1, n, seed=n) for n in lengths]
        second = [tokens(1, n, seed=n + 100) for n in reversed(lengths)]
        packed, belief = layer(torch.cat(first, 1), cu_seqlens=bounds(first))
        more, belief = layer(torch.cat(second, 1), belief, cu_seqlens=bounds(second))
        for i, (a, b) in enumerate(zip(first, second, strict=True)):
            y, own = layer(a)
            z, own = layer(b, own)
            assert_close(packed[:, between(first, i)], y, 1e-9)
            assert_close(more[:, between(second, i)], z, 1e-9)
            rows = belief.map(lambda x, i=i: x[i : i + 1])
            (assert_same_tokens if layer.state_size() is None else assert_same_belief)(rows, own)

    def test_an_empty_sequence_keeps_its_belief(self, layer):
        first, second = tokens(1, 7), tokens(1, 6, seed=2)
        packed, belief = layer(first, cu_seqlens=torch.tensor([0, 0, 4, 4, 7]))
        more, _ = layer(second, belief, cu_seqlens=torch.tensor([0, 2, 2, 5, 6]))
        separate = layer(second[:, :2])[0], layer(second[:, 2:5])[0], layer(second[:, 5:], layer(first[:, 4:])[1])[0]
        assert packed.shape == first.shape
        assert_close(more, torch.cat(separate, 1), 1e-9)

    def test_gradients_of_pieces_are_those_of_the_whole(self, layer):
        x = tokens(2, 17).requires_grad_()
        weight = tokens(2, 17, seed=5)
        whole = torch.autograd.grad((layer(x)[0] * weight).sum(), [x, *layer.parameters()])
        pieces = torch.autograd.grad((in_pieces(layer, x, [0, 6, 7, 17])[0] * weight).sum(), [x, *layer.parameters()])
        for a, b in zip(pieces, whole, strict=True):
            assert_close(a, b, 1e-8)

    def test_every_parameter_matters(self, layer):
        y, _ = layer(tokens(2, 9))
        y.square().sum().backward()
        still = [name for name, p in layer.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]
        assert not still

    def test_causal(self, layer):
        x = tokens(1, 12)
        changed = x.clone()
        changed[:, 7:] += 1
        assert_close(layer(changed)[0][:, :7], layer(x)[0][:, :7], 1e-9)

    def test_sequences_of_a_batch_do_not_meet(self, layer):
        x = tokens(3, 11)
        assert_close(layer(x)[0][1:2], layer(x[1:2])[0], 1e-9)

    def test_float32_is_close_to_float64(self, layer):
        x = tokens(2, 50)
        wide = layer(x)[0]
        narrow = layer.float()(x.float())[0]
        assert_close(narrow.double(), wide, 2e-4)

    def test_bfloat16_runs(self, layer):
        y, belief = layer.bfloat16()(tokens(2, 9).bfloat16())
        y, _ = layer(tokens(2, 1).bfloat16(), belief)
        assert y.dtype == torch.bfloat16
        assert torch.isfinite(y).all()

    def test_state_is_as_declared(self, layer):
        declared = layer.state_size()
        _, belief = layer(tokens(1, 9))
        numbers = sum(part.numel() for _, part in belief.parts())
        if declared is not None:
            assert numbers == declared.total
        else:
            _, belief = layer(tokens(1, 3), belief)
            assert sum(part.numel() for _, part in belief.parts()) > numbers

    def test_a_belief_keeps_no_more_memory_than_it_needs(self, layer):
        if layer.state_size() is None:
            return
        with torch.no_grad():
            _, belief = layer(tokens(1, 300))
        for name, part in belief.parts():
            assert part.untyped_storage().nbytes() <= 2 * part.nbytes + 64, name

    def test_a_detached_belief_cuts_the_gradient_and_nothing_else(self, layer):
        x = tokens(1, 12).requires_grad_()
        _, belief = layer(x[:, :7])
        y, _ = layer(x[:, 7:], belief.detach())
        assert_close(y, layer(x)[0][:, 7:], 1e-9)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        assert not gradient[:, :7].any()
        assert gradient[:, 7:].any()

    def test_a_belief_moves_and_is_never_lowered(self, layer):
        x = tokens(2, 9)
        _, belief = layer(x[:, :6])
        y, _ = layer(x[:, 6:], belief.detach().to(dtype=torch.float64))
        assert_close(y, layer(x)[0][:, 6:], 1e-9)
        moved = belief.to("meta", torch.float32)
        assert type(moved) is type(belief)
        for name, part in moved.parts():
            assert part.is_meta, name
            assert not part.is_floating_point() or part.dtype == torch.float32, name
        with pytest.raises(ValueError, match="^dtype: expected float32 or float64 for a belief, got torch.bfloat16"):
            belief.to(dtype=torch.bfloat16)

    def test_bad_input_is_refused(self, layer):
        with pytest.raises(ValueError, match=rf"^x: expected shape \[B,T,{WIDTH}\]"):
            layer(torch.zeros(2, 3, WIDTH + 1, dtype=torch.float64))
        with pytest.raises(ValueError, match="^cu_seqlens: expected B = 1"):
            layer(tokens(2, 3), cu_seqlens=torch.tensor([0, 3]))
        _, belief = layer(tokens(2, 3))
        with pytest.raises(ValueError, match="^belief: expected one of 3 sequences"):
            layer(tokens(3, 3), belief)

    def test_starting_values_are_stable(self):
        torch.manual_seed(0)
        layer = self.make()
        y, _ = layer(tokens(2, 200, dtype=torch.float32))
        assert torch.isfinite(y).all()
        assert 1e-4 < y.std() < 10
        layer.reset_parameters()


def bounds(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([0, *(p.shape[1] for p in pieces)]).cumsum(0)


def between(pieces: list[torch.Tensor], i: int) -> slice:
    edges = bounds(pieces).tolist()
    return slice(edges[i], edges[i + 1])
