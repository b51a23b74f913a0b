"""Float32 against float64: no fast way loses more than the float32 loop over tokens does, on streams that are hard."""

import pytest
import torch

import membydesign as mbd
from membydesign_bench.accuracy import LOOP, METHODS, STREAMS, distances
from membydesign_bench.problem import Size
from problems import DESIGNS, random_belief, random_problem

FLOOR = 1e-6
"""Distances below this are a few roundings, whose largest is a matter of luck."""


def assert_no_worse_than_the_loop(name: str, size: Size) -> None:
    found = distances(STREAMS[name], size)
    loop = found[LOOP]
    assert loop is not None
    for way in METHODS:
        if "C = 64" in way and "decay" not in name:
            continue  # larger chunks than the default: only who asks for them gets them
        ours = found[way]
        assert ours is not None, way
        for quantity, value in ours._asdict().items():
            assert value <= max(2 * getattr(loop, quantity), FLOOR), f"{way}, {quantity}: {value:.1e}, loop {loop}"


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("D", [16, 64])
def test_no_way_loses_more_than_the_loop(name, D):
    assert_no_worse_than_the_loop(name, Size(1, 2, 512, D))


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("D", [16, 64, 128])
def test_no_way_loses_more_than_the_loop_over_many_tokens(name, D):
    assert_no_worse_than_the_loop(name, Size(1, 2, STREAMS[name].T, D))


def stream_in_pieces(tokens: int, piece: int, D: int) -> None:
    """Belief after belief handed on, in float32 and float64; covariances stay symmetric and positive."""
    stream = STREAMS["trained"]
    beliefs: list[mbd.Belief | None] = [None, None]
    for n in range(tokens // piece):
        inputs = stream.inputs(Size(1, 1, piece, D), seed=n)
        single = mbd.filter_sequence(stream.design(), **inputs, initial=beliefs[0])
        wide = {name: x.double() for name, x in inputs.items()}
        double = mbd.filter_sequence(stream.design(), **wide, initial=beliefs[1])
        beliefs = [single.belief, double.belief]
        P = single.belief.covariance
        assert P is not None
        assert torch.equal(P, P.mT)
        assert torch.linalg.eigvalsh(P.double()).min() > 0
        distance = (single.output.double() - double.output).abs().max() / double.output.abs().max()
        assert distance < 3e-6, f"piece {n}"


@pytest.mark.parametrize("D", [16, 64])
def test_streamed_in_pieces(D):
    stream_in_pieces(20_000, 2_000, D)


@pytest.mark.slow
@pytest.mark.parametrize("D", [16, 64])
def test_a_million_tokens_streamed_in_pieces(D):
    stream_in_pieces(1_000_000, 20_000, D)


@pytest.mark.parametrize("way", [way for way in METHODS if "C" not in way])
@pytest.mark.parametrize("D", [16, 64])
def test_float64_states_for_float32_inputs(way, D):
    """Where float32 is too weak: near-duplicate keys and r² = 1e-4."""
    stream = STREAMS["near-duplicates"]
    inputs = stream.inputs(Size(1, 2, 256, D))
    exact = mbd.filter_sequence(stream.design(), **{name: x.double() for name, x in inputs.items()})
    out = mbd.filter_sequence(stream.design(), **inputs, **METHODS[way], state_dtype=torch.float64)
    assert out.output.dtype == torch.float32
    assert all(x is not None and x.dtype == torch.float64 for x in out.belief)
    torch.testing.assert_close(out.output.double(), exact.output, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", [way for way in METHODS if "C" not in way])
@pytest.mark.parametrize("D", [16, 64])
def test_half_precision_costs_its_own_rounding(way, dtype, D):
    """Outputs are the exact ones of the rounded inputs, rounded once."""
    stream = STREAMS["trained"]
    inputs = stream.inputs(Size(1, 2, 256, D))
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].to(dtype)
    out = mbd.filter_sequence(stream.design(), **inputs, **METHODS[way])
    exact = mbd.filter_sequence(stream.design(), **{name: x.double() for name, x in inputs.items()})
    assert out.output.dtype == dtype
    assert out.belief.mean.dtype == torch.float32
    rounding = torch.finfo(dtype).eps / 2
    error = (out.output.double() - exact.output).abs()
    assert (error <= 1.01 * rounding * exact.output.abs() + 1e-6 * exact.output.abs().max()).all()


@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("train", [False, True])
def test_a_corrupted_belief_is_refused_by_every_way(way, train):
    """Typed, with batch, head and position, before anything is computed from it."""
    design = DESIGNS["dense-scalar"]
    problem = random_problem(design, T=5)
    belief = random_belief(design)
    assert belief.covariance is not None
    belief.covariance[1, 0, 0, 2, 2] = -1.0
    problem.k.requires_grad_(train)
    with pytest.raises(
        mbd.NotPositiveDefiniteError, match="initial.covariance.*batch 1, head 0, group 0, before position 0"
    ):
        problem.filter(initial=belief, **METHODS[way])


@pytest.mark.parametrize(
    ("dtype", "wanted", "expected"),
    [
        (torch.float32, torch.bfloat16, "torch.float32 or torch.float64"),
        (torch.float32, "float64", "torch.float32 or torch.float64"),
        (torch.float64, torch.float32, "torch.float64"),
    ],
)
def test_states_are_never_narrower_than_inputs(dtype, wanted, expected):
    problem = random_problem(DESIGNS["dense-scalar"], dtype=dtype)
    with pytest.raises(ValueError, match=f"^state_dtype: expected {expected}, got"):
        problem.filter(state_dtype=wanted)


def test_native_code_is_for_tensors_on_a_cpu():
    problem = random_problem(DESIGNS["dense-scalar"]).map(lambda x: x.to("meta"))
    message = '^backend: expected "auto" or "torch" for tensors on meta, since native code runs on a CPU.*got "native"$'
    with pytest.raises(ValueError, match=message):
        problem.filter(backend="native")
