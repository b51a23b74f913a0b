r"""flash-linear-attention's GPU kernels for designs that keep no covariance: that library keeps them well.

Its conventions beside ours, all met in `mean_pass` and nowhere else:

    ours                                             fla's
    M_t, [N,H,D,M]                                   initial_state, final_state [N,H,K,V], float32
    log a_t, [B,T,H,1] or [B,T,H,D]                  g [B,T,H] or [B,T,H,K], in logarithms too
    η_t = λ_t / (r_t² + λ_t ‖k_t‖²)                  beta [B,T,H]; above 1 for short keys, which is sound: η ‖k‖² < 1
    ω_t v_t, with ω_t = λ_t / (λ_t + r_t²)           v: an additive rule of theirs has no weight of its own
    q as it is                                       scale=1.0; None would divide q by √K
    k as it is                                       no normalisation in the kernel
    predict → write → read                           the same order
    boundaries [N+1] with B = 1                      cu_seqlens, and cu_seqlens_cpu so that nothing waits for the device

| rule | no decay | one decay | a decay of each row |
|---|---|---|---|
| additive | `chunk_simple_gla` | `chunk_simple_gla` | `chunk_gla` |
| delta | `chunk_delta_rule` | `chunk_gated_delta_rule` | `chunk_kda` |

Gradients are fla's own. Its products of float32 numbers are TF32's, so with float32 inputs it is chosen only where
the user lets torch multiply in TF32.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from functools import partial
from typing import TYPE_CHECKING

import torch

from membydesign.design import DesignModel
from membydesign.filter import transforms
from membydesign.filter.linear import why_not_two_pass
from membydesign.filter.torch import two_pass
from membydesign.filter.torch.mean_pass import MeanPass
from membydesign.install import install_hint
from membydesign.products import rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from membydesign.design import Design, Gains, RowDrift
    from membydesign.filter.inputs import Request, Run

NAME, BACKEND = "flash-linear-attention", "fla"
MODULES = {
    "chunk_simple_gla": "fla.ops.simple_gla",
    "chunk_gla": "fla.ops.gla",
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "fused_recurrent_gated_delta_rule": "fla.ops.gated_delta_rule",
}
"""Where fla has what we call; the last only to measure its decoding step beside ours."""

DEVICES = ("cuda",)
"""Where its kernels run (AMD's devices have this name too)."""

LARGEST_D = 256
"""Of its delta rules."""


@functools.cache
def operation(name: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """A function of fla, or None where it is not installed or cannot be imported, which is said once."""
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        return getattr(importlib.import_module(MODULES[name]), name)
    except (ImportError, AttributeError, RuntimeError) as error:
        warnings.warn(f"membydesign filters without flash-linear-attention's {name}: {error}", stacklevel=2)
        return None


def _name_of(design: DesignModel, drift: RowDrift, dtype: torch.dtype) -> str:
    """The operation for a design with q, k and v in this type."""
    rows = drift.log_decay.shape[-1] > 1
    if not design.write.observes_memory:
        return "chunk_gla" if rows else "chunk_simple_gla"
    if rows:
        return "chunk_kda"
    # The one without decay refuses float32; the gated one does not, and takes g = 0.
    plain = not _decays(design) and dtype != torch.float32
    return "chunk_delta_rule" if plain else "chunk_gated_delta_rule"


def _decays(design: DesignModel) -> bool:
    return bool(design.transition.step_parameters)


def why_not(design: Design, request: Request) -> str | None:
    """Why fla cannot filter the request; None if it can.

    Under backend="auto" it also leaves to torch what it would round more than the user allows, and what torch.compile
    or torch.func would follow, since it breaks their graphs.
    """
    q, D = request.x.q, request.x.q.shape[-1]
    if q.device.type not in DEVICES:
        return f"for tensors on {q.device}, since flash-linear-attention's kernels run on GPUs"
    if request.backend == "auto":
        if torch.compiler.is_compiling() or transforms.active():
            return "under torch.compile and torch.func, which do not see through flash-linear-attention's kernels"
        if not as_exact(request.dtype):
            return "in float32, which flash-linear-attention multiplies in TF32 (torch does not allow it)"
    reason = why_not_two_pass(design, request.x)
    if reason is not None:
        return reason
    assert isinstance(design, DesignModel)
    if design.keeps_covariance:
        return f"for {design.title}, since flash-linear-attention has no filter that keeps a covariance"
    if design.gain_groups(2) > 1:
        return "for gains that differ between value columns, which flash-linear-attention does not support"
    drift = design.transition.row_drift(request.x.parameters, request.x.k)
    if drift is None or drift.angle is not None or drift.removal is not None:
        return f"for {type(design.transition).__name__}, since flash-linear-attention's memories only decay"
    if q.dtype == torch.float64:
        return "in float64, which flash-linear-attention does not support"
    if design.write.observes_memory and D > LARGEST_D:
        return f"for D = {D}, since flash-linear-attention's delta rules have D ≤ {LARGEST_D}"
    if request.chunk_size is not None:
        return f"with chunk_size={request.chunk_size}, since flash-linear-attention chooses its own"
    if request.return_evidence:
        return "with return_evidence=True, since flash-linear-attention returns no errors of writes"
    name = _name_of(design, drift, request.dtype)
    if operation(name) is None:
        return f"without flash-linear-attention's {name} ({install_hint('fla')})"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T], or all packed sequences at once."""
    assert isinstance(design, DesignModel)
    drift = design.transition.row_drift(request.x.parameters, request.x.k)
    assert drift is not None
    name = _name_of(design, drift, request.dtype)
    means = partial(mean_pass, name=name, dtype=request.dtype, decays=_decays(design), bounds=request.bounds)
    return two_pass.run_with(design, request, means, 1)


def as_exact(dtype: torch.dtype) -> bool:
    """Whether fla rounds no more than the user allows: half precision in any case, float32 where TF32 is allowed."""
    return dtype != torch.float32 or rounds("cuda")


def mean_pass(
    drift: RowDrift,
    size: int,
    mean: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gains: Gains,
    *,
    return_error: bool,
    name: str,
    dtype: torch.dtype,
    decays: bool = True,
    bounds: Sequence[int] | None = None,
) -> MeanPass:
    """Run the mean over all tokens; the arguments of `ops.mean_pass.mean_pass`, and then four of its own.

    Args:
        drift: how memory drifts.
        size: not used: fla chooses its own.
        mean: at the start, [B,H,D,M], or [N,H,D,M] of packed sequences.
        q: [B,T,H,D].
        k: None for additive writes.
        v: [B,T,H,M].
        gains: direction and strength of every write.
        return_error: not to be had.
        name: the operation, from `name_of`.
        dtype: the type for q, k and v; decays, gains and states stay in float32.
        decays: whether memory decays at all.
        bounds: of packed sequences, [N+1].
    """
    del size
    assert not return_error
    run = operation(name)
    assert run is not None
    strength, additive = gains.strength[..., 0], k is None
    arguments = {
        "q": q.to(dtype),
        "k": gains.direction[..., 0, :].to(dtype),
        "v": (strength[..., None] * v if additive else v).to(dtype),
        "scale": 1.0,
        "output_final_state": True,
    }
    if not additive:
        arguments["beta"] = strength
    if decays or name == "chunk_gated_delta_rule":
        arguments["g"] = drift.log_decay if name in ("chunk_gla", "chunk_kda") else drift.log_decay[..., 0]
    full = None
    if bounds is not None:  # sequences without a token have no chunk there: their memory stays what it is
        full = [n for n in range(len(bounds) - 1) if bounds[n + 1] > bounds[n]]
        arguments["cu_seqlens_cpu"] = torch.tensor([0, *(bounds[n + 1] for n in full)])
        arguments["cu_seqlens"] = arguments["cu_seqlens_cpu"].to(q.device, non_blocking=True)
    whole = full is None or len(full) == len(mean)
    output, end = run(**arguments, initial_state=mean if whole else mean[full])
    if not whole:
        end = mean.index_copy(0, torch.tensor(full, device=mean.device), end.to(mean.dtype))
    return MeanPass(output.to(q.dtype), None, end.to(mean.dtype))
