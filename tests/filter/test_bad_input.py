"""Wrong inputs get an error that names the argument, what was expected and what came. None gets an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import membydesign as mbd
from membydesign import Belief, catalogue
from problems import random_belief, random_problem

DENSE = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Dense())
GROUPED = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(groups=2), mbd.Dense())
DIAGONAL_DECAY = mbd.DesignModel(mbd.DiagonalDecay(), mbd.ObserveMemory(), mbd.Dense())
ROTATION = mbd.DesignModel(mbd.DampedRotation(), mbd.ObserveMemory(), mbd.Dense())
DIAGONAL = mbd.DesignModel(mbd.Identity(), mbd.ObserveMemory(), mbd.Diagonal())
RESET, COLUMN_RESET = catalogue["deltanet"], catalogue["longhorn"]
ADDITIVE = catalogue["linear_attention"]

Arguments = dict[str, Any]


def changed(name: str, f: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, name: f(arguments[name])}


def given(**values: Any) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, **values}


def put(value: float, *index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def f(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = value
        return x

    return f


def belief_with(design: mbd.DesignModel, **changes: Any) -> Belief:
    return random_belief(design)._replace(**changes)


def asymmetric(P: torch.Tensor) -> torch.Tensor:
    return put(P[0, 0, 0, 0, 1].item() + 1.0, 0, 0, 0, 0, 1)(P)


def indefinite(P: torch.Tensor) -> torch.Tensor:
    """Positive diagonal, symmetric, and yet with a negative eigenvalue."""
    P = P.clone()
    P[1, 0, 0] = torch.eye(4, dtype=P.dtype)
    P[1, 0, 0, 0, 1] = P[1, 0, 0, 1, 0] = 2.0
    return P


def covariance_of(design: mbd.DesignModel) -> torch.Tensor:
    covariance = random_belief(design).covariance
    assert covariance is not None
    return covariance


B, T, H, D, M = 2, 7, 2, 4, 4
INTS = torch.int32

# (what is wrong, design, how to spoil good arguments, what the message must say after the argument's name)
CASES: list[tuple[str, mbd.DesignModel, Callable[[Arguments], Arguments], str, str]] = [
    ("q is not a tensor", DENSE, given(q=[[1.0]]), "q", "expected a tensor"),
    ("q is a NumPy array", DENSE, changed("q", lambda x: x.numpy()), "q", "numpy.ndarray of shape [2, 7, 2, 4]"),
    ("q is 3-D", DENSE, changed("q", lambda x: x[0]), "q", "expected shape [B,T,H,D]"),
    ("q is integer", DENSE, changed("q", lambda x: x.long()), "q", "floating-point"),
    ("q is complex", DENSE, changed("q", lambda x: x.to(torch.complex128)), "q", "floating-point"),
    ("q is NaN", DENSE, changed("q", put(float("nan"), 1, 2, 0, 3)), "q", "got nan at batch 1, position 2, head 0"),
    ("q is empty", DENSE, changed("q", lambda x: x[:, :0]), "q", "at least one element"),
    ("q is wider than k", DENSE, changed("q", lambda x: x.repeat(1, 1, 1, 2)), "k", "the shape of q"),
    ("k misses a token", DENSE, changed("k", lambda x: x[:, 1:]), "k", "the shape of q"),
    ("k misses a head", DENSE, changed("k", lambda x: x[:, :, 1:]), "k", "the shape of q"),
    ("k is infinite", DENSE, changed("k", put(float("inf"), 0, 0, 0, 0)), "k", "got inf at batch 0"),
    ("k has another dtype", DENSE, changed("k", lambda x: x.float()), "k", "the dtype of q, torch.float64"),
    ("k is on another device", DENSE, changed("k", lambda x: x.to("meta")), "k", "the device of q, cpu"),
    ("v misses a token", DENSE, changed("v", lambda x: x[:, 1:]), "v", "to go with q"),
    ("v has another batch", DENSE, changed("v", lambda x: x[:1]), "v", "to go with q"),
    ("v is NaN", DENSE, changed("v", put(float("nan"), 0, 6, 1, 0)), "v", "got nan at batch 0, position 6"),
    ("v has no columns", DENSE, changed("v", lambda x: x[..., :0]), "v", "at least one element"),
    ("columns do not divide into groups", GROUPED, changed("v", lambda x: x[..., :3]), "v", "2 noise groups"),
    (
        "odd D for a rotation",
        ROTATION,
        lambda a: {**a, "q": a["q"][..., :3], "k": a["k"][..., :3]},
        "q",
        "an even D, since DampedRotation turns rows in pairs, got D = 3",
    ),
    ("process_noise missing", DENSE, given(process_noise=None), "process_noise", "which needs process_noise (ℓ_t²)"),
    ("process_noise negative", DENSE, given(process_noise=-0.1), "process_noise", "variances >= 0, got -0.1"),
    (
        "process_noise negative at one place",
        DENSE,
        changed("process_noise", put(-1e-9, 1, 3, 0)),
        "process_noise",
        "got -1e-09 at batch 1, position 3, head 0",
    ),
    ("process_noise NaN", DENSE, given(process_noise=float("nan")), "process_noise", "finite values, got nan"),
    ("process_noise per dimension", DENSE, given(process_noise=torch.ones(B, T, H, D)), "process_noise", "[2, 7, 2]"),
    ("process_noise for a reset", RESET, given(process_noise=0.1), "process_noise", "expected None"),
    ("process_noise for additive", ADDITIVE, given(process_noise=0.1), "process_noise", "expected None"),
    ("process_noise is a string", DENSE, given(process_noise="0.1"), "process_noise", "got '0.1' (str)"),
    ("process_noise is a bool", DENSE, given(process_noise=True), "process_noise", "got True (bool)"),
    ("write_noise missing", DENSE, given(write_noise=None), "write_noise", "which needs write_noise (r_t²)"),
    ("write_noise zero", DENSE, given(write_noise=0.0), "write_noise", "variances > 0, got 0"),
    ("write_noise negative", RESET, given(write_noise=-1.0), "write_noise", "variances > 0, got -1"),
    ("write_noise negative, additive", ADDITIVE, given(write_noise=-1.0), "write_noise", "variances >= 0, got -1"),
    ("write_noise is integer", DENSE, changed("write_noise", lambda x: x.long()), "write_noise", "floating-point"),
    ("write_noise of 3 groups", GROUPED, given(write_noise=torch.ones(B, T, H, 3)), "write_noise", "[2, 7, 2, 2]"),
    ("write_noise of 2 groups for 1", DENSE, given(write_noise=torch.ones(B, T, H, 2)), "write_noise", "[2, 7, 2, 1]"),
    ("write_noise per column", COLUMN_RESET, given(write_noise=torch.ones(B, T, H, M)), "write_noise", "[2, 7, 2]"),
    ("write_noise head first", DENSE, given(write_noise=torch.ones(B, H, T)), "write_noise", "got shape [2, 2, 7]"),
    ("write_noise elsewhere", DENSE, changed("write_noise", lambda x: x.to("meta")), "write_noise", "device of q"),
    ("write_noise infinite", DENSE, given(write_noise=float("inf")), "write_noise", "finite values"),
    ("prior_variance missing", RESET, given(prior_variance=None), "prior_variance", "which needs prior_variance (λ_t)"),
    ("prior_variance zero", RESET, given(prior_variance=0.0), "prior_variance", "variances > 0"),
    ("prior_variance not per column", COLUMN_RESET, given(prior_variance=torch.ones(B, T, H)), "prior_variance", "4]"),
    ("prior_variance for dense", DENSE, given(prior_variance=1.0), "prior_variance", "expected None"),
    ("log_decay missing", DIAGONAL_DECAY, given(log_decay=None), "log_decay", "which needs log_decay (log α_t)"),
    ("log_decay above zero", DIAGONAL_DECAY, given(log_decay=0.1), "log_decay", "for decays of at most one"),
    ("log_decay is a decay", DIAGONAL_DECAY, given(log_decay=0.9), "log_decay", "passed as its .log()"),
    ("log_decay minus infinity", DIAGONAL_DECAY, given(log_decay=-float("inf")), "log_decay", "finite values"),
    ("log_decay scalar for vector", DIAGONAL_DECAY, given(log_decay=-torch.ones(B, T, H)), "log_decay", "[2, 7, 2, 4]"),
    (
        "log_decay for identity",
        DENSE,
        given(log_decay=-0.1),
        "log_decay",
        "None, since A design of your own has process_noise, write_noise",
    ),
    ("log_decay per row for pairs", ROTATION, given(log_decay=-torch.ones(B, T, H, D)), "log_decay", "[2, 7, 2, 2]"),
    ("angle missing", ROTATION, given(angle=None), "angle", "which needs angle (θ_t)"),
    (
        "angle for a decay",
        DIAGONAL_DECAY,
        given(angle=0.1),
        "angle",
        "None, since A design of your own has log_decay, process_noise, write_noise",
    ),
    ("angle NaN", ROTATION, given(angle=float("nan")), "angle", "finite values"),
    ("cu_seqlens is a list", DENSE, given(cu_seqlens=[0, 7]), "cu_seqlens", "integer tensor"),
    ("cu_seqlens with a batch", DENSE, given(cu_seqlens=torch.tensor([0, 7])), "cu_seqlens", "B = 1"),
    ("belief is a tensor", DENSE, given(initial=torch.zeros(B, H, D, M)), "initial", "expected a Belief"),
    ("diagonal belief", DENSE, given(initial=random_belief(DIAGONAL)), "initial.covariance", "shape [2, 2, 1"),
    ("belief of a dense design", DIAGONAL, given(initial=random_belief(DENSE)), "initial.covariance", "[2, 2, 1, 4]"),
    ("belief with covariance", RESET, given(initial=random_belief(DENSE)), "initial.covariance", "None, since"),
    ("belief without covariance", DENSE, given(initial=random_belief(RESET)), "initial.covariance", "got None"),
    ("belief of other groups", DENSE, given(initial=random_belief(GROUPED)), "initial.covariance", "[2, 2, 1, 4, 4]"),
    ("belief of another batch", DENSE, given(initial=random_belief(DENSE, B=3)), "initial.mean", "[2, 2, 4, 4]"),
    ("belief of other heads", DENSE, given(initial=random_belief(DENSE, H=1)), "initial.mean", "[2, 2, 4, 4]"),
    ("belief of another D", DENSE, given(initial=random_belief(DENSE, D=6)), "initial.mean", "[2, 2, 4, 4]"),
    ("belief of another M", DENSE, given(initial=random_belief(DENSE, M=6)), "initial.mean", "[2, 2, 4, 4]"),
    (
        "belief in bfloat16",
        DENSE,
        given(initial=random_belief(DENSE).map(lambda x: x.bfloat16())),
        "initial.mean",
        "float32 or float64",
    ),
    (
        "belief with NaN",
        DENSE,
        given(initial=belief_with(DENSE, mean=torch.full((B, H, D, M), float("nan")))),
        "initial.mean",
        "finite values",
    ),
    (
        "belief elsewhere",
        DENSE,
        given(initial=random_belief(DENSE).map(lambda x: x.to("meta"))),
        "initial.mean",
        "device of q",
    ),
    (
        "asymmetric covariance",
        DENSE,
        given(initial=belief_with(DENSE, covariance=asymmetric(covariance_of(DENSE)))),
        "initial.covariance",
        "symmetric matrices",
    ),
    (
        "indefinite covariance",
        DENSE,
        given(initial=belief_with(DENSE, covariance=indefinite(covariance_of(DENSE)))),
        "initial.covariance",
        "a negative eigenvalue at batch 1, head 0, group 0",
    ),
    (
        "negative variance",
        DIAGONAL,
        given(initial=belief_with(DIAGONAL, covariance=-torch.ones(B, H, 1, D))),
        "initial.covariance",
        "at least 0, got -1",
    ),
    ("variance of a mean-only design", ADDITIVE, given(return_variance=True), "return_variance", "keeps no covariance"),
    ("unknown method", DENSE, given(method="magic"), "method", "got 'magic'"),
]

PACKED = [
    ("boundaries are floats", torch.tensor([0.0, 7.0]), "int32 or int64"),
    ("boundaries are 2-D", torch.zeros(2, 2, dtype=INTS), "shape [N+1]"),
    ("one boundary", torch.tensor([0], dtype=INTS), "shape [N+1]"),
    ("does not start at 0", torch.tensor([1, 7], dtype=INTS), "from 0 to T = 7, got from 1"),
    ("does not end at T", torch.tensor([0, 6], dtype=INTS), "from 0 to T = 7"),
    ("decreases", torch.tensor([0, 5, 3, 7], dtype=INTS), "boundaries that never decrease, got 5, 3 at index 1"),
]


def good_arguments(design: mbd.DesignModel, batch: int = B) -> Arguments:
    problem = random_problem(design, B=batch)
    return {"q": problem.q, "k": problem.k, "v": problem.v, **problem.parameters}


def test_there_are_forty_or_more():
    assert len(CASES) + len(PACKED) >= 40


@pytest.mark.parametrize("design", [DENSE, GROUPED, DIAGONAL_DECAY, ROTATION, DIAGONAL, RESET, COLUMN_RESET, ADDITIVE])
def test_the_unspoilt_arguments_are_good(design):
    mbd.filter_sequence(design, **good_arguments(design))


@pytest.mark.parametrize(("what", "design", "spoil", "argument", "message"), CASES, ids=[case[0] for case in CASES])
def test_filter_sequence_refuses(what, design, spoil, argument, message):
    with pytest.raises(ValueError) as error:
        mbd.filter_sequence(design, **spoil(good_arguments(design)))
    assert str(error.value).startswith(f"{argument}: expected ")
    assert message in str(error.value)
    assert ", got " in str(error.value)


@pytest.mark.parametrize(("what", "cu_seqlens", "message"), PACKED, ids=[case[0] for case in PACKED])
def test_bad_boundaries_are_refused(what, cu_seqlens, message):
    with pytest.raises(ValueError, match="^cu_seqlens: expected") as error:
        mbd.filter_sequence(DENSE, **good_arguments(DENSE, batch=1), cu_seqlens=cu_seqlens)
    assert message in str(error.value)


def test_a_belief_for_each_packed_sequence():
    arguments = good_arguments(DENSE, batch=1)
    with pytest.raises(ValueError, match=r"initial.mean: expected shape \[2, 2, 4, 4\]"):
        mbd.filter_sequence(DENSE, **arguments, cu_seqlens=torch.tensor([0, 3, 7]), initial=random_belief(DENSE, B=1))


def test_design_must_be_a_design():
    arguments = good_arguments(DENSE)
    with pytest.raises(ValueError, match=r"design: expected a Design, such as catalogue\['kda'\], got 'kda'"):
        mbd.filter_sequence("kda", **arguments)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (changed("q", lambda x: x[:, None]), r"q: expected shape \[B,H,D\], got shape \[2, 1, 2, 4\]"),
        (given(process_noise=torch.ones(3)), r"process_noise: expected a number or a tensor \[B,H\] = \[2, 2\], got"),
        (given(k=None), r"k: expected a tensor \[B,H,D\]"),
        (changed("write_noise", lambda x: -x), "write_noise: expected variances > 0"),
        (changed("belief", lambda b: b.map(lambda x: x[:1])), "belief.mean: expected shape"),
        (given(belief=random_belief(DIAGONAL)), "belief.covariance: expected shape"),
        (given(belief=None), "belief: expected a Belief"),
        (given(prior_variance=1.0), "prior_variance: expected None"),
    ],
)
def test_filter_step_refuses(spoil, message):
    arguments = {name: x[:, 0] for name, x in good_arguments(DENSE).items()}
    with pytest.raises(ValueError, match=message):
        mbd.filter_step(DENSE, **spoil({**arguments, "belief": random_belief(DENSE)}))


def near_duplicates(dtype: torch.dtype, write_noise: float) -> mbd.Filtered:
    """The weak ground of any covariance form: r² far below p₀, one key again and again, no process noise."""
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 16, generator=generator), dim=-1)
    k = (k + 1e-4 * torch.randn(1, 50, 1, 16, generator=generator)).to(dtype)
    return mbd.filter_sequence(DENSE, k, k, k, process_noise=0.0, write_noise=write_noise)


def test_a_lost_covariance_is_reported_not_repaired():
    with pytest.raises(
        mbd.NotPositiveDefiniteError, match=r"float32 at batch 0, position \d+, head 0, group 0: innovation variance"
    ):
        near_duplicates(torch.float32, write_noise=1e-9)
    assert torch.isfinite(near_duplicates(torch.float64, write_noise=1e-9).output).all()


def ones(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, scale, dtype=dtype)


KALMAN = {"process_noise": 0.1, "write_noise": 0.1}
LATENT = {"prior_variance": 1.0, "write_noise": 0.1}
LATENT_DENSE = mbd.DesignModel(mbd.Identity(), mbd.LatentInput(), mbd.Dense())
OVERFLOWS = [
    ("keys", DENSE, {"k": 1e20}, KALMAN, {}, "the innovation precision overflowed in torch.float32 at batch 0"),
    ("keys of a reset", RESET, {"k": 1e20}, LATENT, {}, "the innovation precision overflowed"),
    ("tiny noise, no key", RESET, {"k": 0.0}, {"prior_variance": 1.0, "write_noise": 1e-39}, {}, "it is inf"),
    ("values", ADDITIVE, {"v": 3e38}, {"prior_variance": 1.0, "write_noise": 0.0}, {}, "output overflowed"),
    ("keys of a latent input", LATENT_DENSE, {"k": 1e20, "q": 1e-20}, LATENT, {}, "belief.covariance overflowed"),
    ("queries", DENSE, {"q": 1e25}, KALMAN, {"return_variance": True}, "variance overflowed"),
    ("evidence", DENSE, {"v": 1e30}, KALMAN, {"return_evidence": True}, "log_evidence overflowed"),
]


@pytest.mark.parametrize(("what", "design", "scales", "numbers", "options", "message"), OVERFLOWS)
def test_overflow_is_reported(what, design, scales, numbers, options, message):
    q, k, v = (ones(1, 3, 1, 4, scale=scales.get(name, 1.0)) for name in ("q", "k", "v"))
    with pytest.raises(mbd.NonFiniteError, match=message):
        mbd.filter_sequence(design, q, k, v, **numbers, **options)


def test_overflow_of_the_output_type_is_reported():
    x = ones(1, 9, 1, 4, scale=100.0, dtype=torch.float16)
    with pytest.raises(mbd.NonFiniteError, match="output overflowed in torch.float16"):
        mbd.filter_sequence(ADDITIVE, x, x, x, prior_variance=1.0, write_noise=0.0)


def test_overflow_of_a_step_is_reported():
    x = ones(1, 1, 4, scale=1e20)
    with pytest.raises(mbd.NonFiniteError, match="the innovation precision overflowed"):
        mbd.filter_step(DENSE, Belief.prior(DENSE, 1, 1, 4, 4), x, x, x, **KALMAN)


@pytest.mark.parametrize("design", [DENSE, RESET])
def test_variances_are_never_negative(design):
    """r² far below everything else: what rounding leaves of a resolved direction must not come out below zero."""
    k = torch.randn(1, 2000, 1, 16, generator=torch.Generator().manual_seed(0))
    numbers: Arguments = {"prior_variance": 1.0} if design is RESET else {"process_noise": 0.1}
    out = mbd.filter_sequence(design, k, k, k, **numbers, write_noise=1e-6, return_variance=True)
    assert out.variance is not None
    assert (out.variance >= 0).all()
    if design is RESET:  # q = k: λ r²‖k‖²/(r² + λ‖k‖²), to the last digits
        torch.testing.assert_close(out.variance, torch.full_like(out.variance, 1e-6), rtol=1e-4, atol=0)


def test_the_float32_stall_is_as_documented():
    """One key, 2,000 writes, no process noise: docs/concepts/recurrence.md says what float32 makes of r²/n."""
    k = torch.nn.functional.normalize(torch.randn(16, generator=torch.Generator().manual_seed(0)), dim=0)
    k = k.expand(1, 2000, 1, 16)
    design = DENSE.replace(covariance=mbd.Dense(prior=3.0))
    found = {}
    for dtype in (torch.float32, torch.float64):
        x = k.to(dtype)
        out = mbd.filter_sequence(
            design, x, x, x, process_noise=0.0, write_noise=0.05, return_variance=True, method="recurrent"
        )
        assert out.variance is not None
        found[dtype] = out.variance[0, -1, 0, 0].item()
    assert found[torch.float64] == pytest.approx(0.05 / 2000, rel=1e-2)
    stall = (torch.finfo(torch.float32).eps * 3.0 * 0.05) ** 0.5
    assert 0.3 * stall < found[torch.float32] < 1.5 * stall


def test_beliefs_of_mixed_types_are_widened():
    belief = random_belief(DENSE)
    mixed = Belief(belief.mean.float(), belief.covariance)
    arguments = {name: x.float() for name, x in good_arguments(DENSE).items()}
    out = mbd.filter_sequence(DENSE, **arguments, initial=mixed)
    assert out.belief.mean.dtype == torch.float64
    assert out.output.dtype == torch.float32


@pytest.mark.parametrize("call", ["sequence", "step"])
def test_a_number_is_as_exact_as_the_belief(call):
    """A Python number next to float32 keys and a float64 belief is not rounded to float32 on its way."""
    design = mbd.DesignModel(mbd.ScalarDecay(), mbd.ObserveMemory(), mbd.Diagonal())
    x = torch.randn(1, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    belief = design.prior(mbd.Sizes(1, 2, 4, 4), dtype=torch.float64, device="cpu")
    step: dict[str, Any] = {"log_decay": -0.3925552440925444, "process_noise": 0.1, "write_noise": 1e-7}

    def covariance(x):
        if call == "step":
            x = x[:, 0].clone().requires_grad_()  # which native code does not follow
            return mbd.filter_step(design, belief, x, x, x, **step)[1].covariance.detach()
        return mbd.filter_sequence(design, x, x, x, initial=belief, **step).belief.covariance

    torch.testing.assert_close(covariance(x), covariance(x.double()), rtol=1e-14, atol=0)
