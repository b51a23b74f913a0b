"""Compare the library with the reference, in units of what rounding does to the very same problem.

For every result of a head, `spread` is the largest distance of a disturbed replica of the reference from the
undisturbed one (`reference`). A result may differ by `SAFETY · spread`, and by one rounding to its own type. Where that
is more than `JUDGED` of the largest number of the head, a wrong sign could pass: such a result is counted as
ill-conditioned instead of being called right.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import membydesign as mbd
from fuzzing import running
from fuzzing.expected import Expected, run_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzzing.cases import Case, Problem
    from fuzzing.running import Outcome

SAFETY = 64.0
"""Kernels sum in another order than the reference, over chunks of tokens and with other factors; three replicas show
about half of the largest error that they could."""

JUDGED = 0.05
"""The largest tolerance, relative to the largest number of a head, with which a result is judged."""


@dataclass
class Verdict:
    """What a case showed.

    Attributes:
        findings: what is wrong, one line each.
        judged: how many results were compared.
        ill_conditioned: how many results rounding alone makes unpredictable.
        raised: the documented error that the filter raised, if the reference confirms it.
        worst: the largest distance, in units of the spread, of all results that were judged.
    """

    findings: list[str] = field(default_factory=list)
    judged: int = 0
    ill_conditioned: int = 0
    raised: str | None = None
    worst: float = 0.0


def judge(case: Case, problem: Problem) -> Verdict:
    """Run a case both ways and compare."""
    verdict = Verdict()
    tensors = {name: x for name, x in (*problem.tensors.items(), *problem.initial.items()) if isinstance(x, Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}
    reference = run_reference(case, problem)
    try:
        library = running.run_library(case, problem)
    except mbd.FilterError as error:
        _judge_error(error, case, problem, reference, verdict)
        return verdict
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        verdict.findings.append(f"raised {type(error).__name__}: {error} ({place.name}, line {place.lineno})")
        return verdict
    for name, x in tensors.items():
        if not torch.equal(x, before[name]):
            verdict.findings.append(f"{name}: the argument was changed")
    _judge_types(case, problem, library, verdict)
    _judge_covariance(case, library, verdict)
    expected = reference.differentiated(case, library)
    if expected.gradients and not library.gradients:
        verdict.findings.append(f"{case.target}: has no gradient")
    dtype = running.working_dtype(case, problem)
    for name, x in library.results.items():
        _compare(name, x, expected.results[name], dtype, verdict)
    if _differentiable(case, expected, dtype):
        for name, x in library.gradients.items():
            given = (
                problem.initial[name.removeprefix("initial ")] if name.startswith("initial ") else problem.tensors[name]
            )
            assert isinstance(given, Tensor)
            y = expected.gradients[name]
            magnitude = x.abs()
            if name == "initial kept" and (case.spec.keeps_matrix or case.spec.has_blocks):
                x, y, magnitude = x + x.mT, y + y.mT, magnitude + magnitude.mT  # only symmetric changes are allowed
            flow = _share_of_flow(name, case, given) * expected.gradients["flow"].sum().item()
            _compare(f"gradient of {name}", x, y, dtype, verdict, flow, magnitude)
    return verdict


FLOWS = {"log_decay": 1.0, "angle": 1.0, "log_discount": 0.5}
"""Gradients that chunks have as differences of larger numbers."""
LEAST_RETENTION = 1 / 16
"""The least γ that chunks take; a smaller one is filtered token by token, and its gradient is no such difference."""


def _share_of_flow(name: str, case: Case, given: Tensor) -> Tensor | float:
    """How much of what flows through memory enters a gradient; that of γ is the one of log √γ, over 2γ."""
    if name == "retention" and case.spec.kept == "partial_reset":
        return 0.5 / given.detach().double().clamp_min(LEAST_RETENTION)
    return FLOWS.get(name, 0.0)


def _judge_types(case: Case, problem: Problem, library: Outcome, verdict: Verdict) -> None:
    """States have the widest type, outputs that of q, gradients that of their argument."""
    dtype = running.working_dtype(case, problem)
    for name, x in library.results.items():
        promised = case.dtype if name == "output" else dtype
        if x.dtype != promised:
            verdict.findings.append(f"{name}: expected {promised}, got {x.dtype}")


def _judge_covariance(case: Case, library: Outcome, verdict: Verdict) -> None:
    """Variances are at least zero, and matrices as positive definite as the filter wants them to resume from."""
    variance, kept = library.results.get("variance"), library.results.get("kept")
    if variance is not None and bool((variance < 0).any()):
        verdict.findings.append(f"variance: expected at least 0, got {variance.min().item():.3g}")
    if kept is None or case.spec.kept in (
        "counts",
        "example_block",
    ):  # the blocks are an example's, which promises nothing
        return
    if case.spec.kept == "diagonal":
        if bool((kept < 0).any()):
            verdict.findings.append(f"kept: expected variances of at least 0, got {kept.min().item():.3g}")
        return
    scale = kept.diagonal(dim1=-2, dim2=-1).abs().amax(-1).clamp_min(torch.finfo(kept.dtype).tiny)[..., None, None]
    D = case.sizes[3]
    rounding = 8 * max(D, 8) * torch.finfo(kept.dtype).eps  # what `filter_sequence` accepts as `initial`
    smallest = torch.linalg.eigvalsh((kept / scale).double()).min().item()
    if smallest < -rounding:
        verdict.findings.append(
            f"kept: expected positive semi-definite matrices, got a relative eigenvalue {smallest:.3g}"
        )


def _judge_error(error: Exception, case: Case, problem: Problem, expected: Expected, verdict: Verdict) -> None:
    """A typed error is right where the reference says that rounding or the range of the type is the cause."""
    dtype = running.working_dtype(case, problem)
    finite = torch.finfo(dtype)
    spread = 0.0
    trust = expected.trust
    if trust is not None:
        spread = (trust - trust[:1]).abs().max().item()
        if not bool(trust.isfinite().all()):
            spread = torch.inf
    ranges = [x[0].abs().max().item() for x in expected.results.values() if x.numel()]
    narrow = expected.results["output"][0].abs().max().item() / torch.finfo(case.dtype).max
    # some function of the results, such as the square of a covariance, must leave the range of the type
    overflows = narrow > 0.5 or any(not x < finite.max**0.5 for x in ranges)
    singular = SAFETY * spread > finite.eps**0.5 or any(_may_lose_sign(P) for P in expected.covariances)
    if isinstance(error, mbd.NotPositiveDefiniteError) and not singular:
        verdict.findings.append(f"raised {type(error).__name__} with a spread of β r² of {spread:.1e}: {error}")
    elif isinstance(error, mbd.NonFiniteError) and not overflows:
        verdict.findings.append(f"raised {type(error).__name__} with results up to {max(ranges):.1e}: {error}")
    else:
        verdict.raised = type(error).__name__


def _may_lose_sign(replicas: Tensor) -> bool:
    """Whether rounding errors of matrices, [N,...,D,D], are as large as one of their eigenvalues."""
    if not bool(replicas.isfinite().all()):
        return True
    smallest = torch.linalg.eigvalsh(replicas[0])[..., 0]
    spread = (replicas - replicas[:1]).abs().amax((0, -2, -1))
    return bool((smallest <= SAFETY * replicas.shape[-1] * spread).any())


def _differentiable(case: Case, expected: Outcome, dtype: torch.dtype) -> bool:
    """Whether gradients can be compared: not those of a variance that rounding may clamp to zero."""
    variance = expected.results.get("variance")
    if variance is None or case.target not in ("variance", "everything") or not variance.numel():
        return True
    spread = (variance - variance[:1]).abs().amax(0)
    return bool((variance[0] > SAFETY * spread + torch.finfo(dtype).tiny).all())


def _compare(
    name: str,
    x: Tensor,
    replicas: Tensor,
    dtype: torch.dtype,
    verdict: Verdict,
    flow: Tensor | float = 0.0,
    magnitude: Tensor | None = None,
) -> None:
    """One result of all heads.

    Args:
        name: of the result.
        x: from the library.
        replicas: from the reference.
        dtype: in which the filter computes.
        verdict: to add to.
        flow: what the sums add up to of which kernels have this gradient as a difference (those in `FLOWS`), for each
            entry of x or for all.
        magnitude: of the numbers that were rounded to the type of x, if they are larger than x.
    """
    if not x.numel():
        return
    y = replicas[0]
    own = torch.finfo(x.dtype)
    heads = _by_head(name, x)
    magnitude = heads((x if magnitude is None else magnitude).double().abs())
    x, y, spread = (heads(part) for part in (x.double(), y, (replicas - replicas[:1]).abs().amax(0)))
    largest, spread = y.abs().amax(-1, keepdim=True), spread.amax(-1, keepdim=True)
    least = torch.finfo(dtype).tiny ** (2 / 3)  # products of three such numbers underflow
    flow = heads(flow) if isinstance(flow, Tensor) else flow
    tolerance = SAFETY * (spread + torch.finfo(dtype).eps * (largest + flow)) + least
    ill = ~(tolerance.amax(-1, keepdim=True) <= JUDGED * largest + 2 * least)
    overflows = y.abs() > 0.5 * own.max
    distance = (x - y).abs()
    allowed = tolerance + own.eps * magnitude + own.tiny
    wrong = ~(distance <= allowed) & ~ill & ~overflows
    verdict.judged += int((~ill).sum())
    verdict.ill_conditioned += int(ill.sum())
    ratio = (distance / allowed)[~ill.expand_as(distance) & ~overflows]
    if ratio.numel():
        verdict.worst = max(verdict.worst, ratio.nan_to_num(torch.inf).max().item())
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        verdict.findings.append(
            f"{name}: expected {y[at].item():.9g}, got {x[at].item():.9g}, tolerance {allowed[at].item():.2g} "
            f"({int(wrong.sum())} of {wrong.numel()} entries)"
        )


def _by_head(name: str, x: Tensor) -> Callable[[Tensor], Tensor]:
    """How to bring the entries of each head together, [B,H,n]; numbers shared by all heads are those of one."""
    if name.removeprefix("gradient of initial ") in ("mean", "kept", "shape", "rate", "total evidence"):
        return lambda part: part.reshape(*part.shape[:2], -1)
    if x.ndim < 3:
        return lambda part: part.reshape(1, 1, -1)
    return lambda part: part.movedim(2, 1).flatten(2)
