"""What processes check of layers whose tokens are split over them; `test_stretches.py` runs it."""

from itertools import accumulate

import torch
import torch.distributed as dist

import membydesign as mbd
from distributed.stretches import close, own_part, weights_of
from membydesign.layers import make_layer

SIZES = {"hidden_size": 8, "num_heads": 2, "head_dim": 4}
LENGTHS = {2: ((6, 5), (2, 9), (0, 11)), 4: ((3, 1, 5, 2), (1, 0, 6, 4))}
LAYERS = {
    "bayesian_layer": {"short_convolution": 4},
    "gated_deltanet": {},
    "rwkv7": {},
    "mlstm": {},
    "attention": {},
}


def layer_compared(name: str, lengths: tuple[int, ...], schedule, bounds: list[int] | None, **options) -> None:
    torch.manual_seed(0)
    layer = make_layer(name, **SIZES, **options).double()
    T = lengths_total(lengths)
    x = torch.randn(1 if bounds else 2, T, 8, dtype=torch.float64, requires_grad=True)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    weight = weights_of(x, 3)
    y, _ = layer(x, cu_seqlens=cu_seqlens)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    own = own_part(x, lengths)
    stretch = mbd.Stretch.of(own, cu_seqlens=cu_seqlens, schedule=schedule)
    mine, _ = layer(own, stretch=stretch)
    what = f"{name}, {schedule}, {lengths}, {bounds}"
    close(mine, own_part(y, lengths), 1e-9, what)
    (mine * own_part(weight, lengths)).sum().backward()
    for i, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
        dist.all_reduce(found)
        close(found, torch.zeros_like(leaf) if gradient is None else gradient, 1e-9, f"{what}, gradient {i}")


def lengths_total(lengths: tuple[int, ...]) -> int:
    return [*accumulate(lengths)][-1]


def check_layers() -> None:
    for name, options in LAYERS.items():
        for lengths in LENGTHS[dist.get_world_size()]:
            for bounds in (None, [0, 3, 8, 11], [0, 11]):
                layer_compared(name, lengths, "auto", bounds, **options)


def check_convolutions_in_a_pipeline() -> None:
    layer_compared("bayesian_layer", LENGTHS[dist.get_world_size()][1], "pipeline", None, short_convolution=4)
