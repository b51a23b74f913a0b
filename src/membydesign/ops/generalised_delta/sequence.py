"""The generalised delta rule over sequences: checked, in the state's type, packed or not."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from membydesign.ops.checks import check_cu_seqlens
from membydesign.ops.dispatch import run_generalised_delta
from membydesign.ops.filtering import check_way, without_autocast
from membydesign.ops.generalised_delta import naive
from membydesign.ops.generalised_delta.naive import Steps
from membydesign.ops.packed import PADDING, batches
from membydesign.ops.transforms import beyond_native, values

if TYPE_CHECKING:
    from collections.abc import Callable


BACKENDS = ("auto", "torch", "cpu")
"""Of the generalised delta rule."""

STRONGEST = -60.0
"""The smallest log-decay of the chunk form: e^60 still has room below float32's largest number."""


def generalised_delta_rule(
    log_decay: Tensor,
    removal_key: Tensor,
    removal: Tensor,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    *,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    method: Literal["chunk", "recurrent"] = "chunk",
    chunk_size: int | None = None,
    backend: Literal["auto", "torch", "cpu"] = "auto",
) -> tuple[Tensor, Tensor]:
    r"""The recurrence of RWKV-7, and of other memories that remove and write with different keys.

    $$M_t = \mathrm{diag}(w_t) M_{t-1} - b_t (M_{t-1}^\top \kappa_t)^\top + k_t v_t^\top, \qquad y_t = M_t^\top q_t$$

    Args:
        log_decay: $\log w_t$, at most 0, [B,T,H,D]; decays of "chunk" must stay away from 0, since 1/w is formed.
        removal_key: $\kappa_t$, what is read to be removed, [B,T,H,D].
        removal: $b_t$, where it is removed, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: written values, [B,T,H,M].
        q: queries, [B,T,H,D].
        initial: the memory to start from, [B,H,D,M] ([N,H,D,M] packed); default zero.
        cu_seqlens: boundaries [N+1] of N sequences packed into one row (B = 1).
        method: "chunk", many tokens at once, exactly; or "recurrent", the loop over tokens that specifies it.
        chunk_size: how many tokens a chunk has; by default what is fast.
        backend: "torch" for any device, "cpu" for native code; by default whichever is fastest where the tensors are.

    Returns:
        Outputs, [B,T,H,M], in the type of v, and the memory after the last token, float32 at least.
    """
    check_way(method, backend, BACKENDS)
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"chunk_size: expected a whole number of at least 1, or None, got {chunk_size!r}")
    x = Steps(log_decay, removal_key, removal, k, v, q)
    _check_shapes(x)
    _check_decays(log_decay, method)
    bounds = None if cu_seqlens is None else check_cu_seqlens(cu_seqlens, q)
    batch = q.shape[0] if bounds is None else len(bounds) - 1
    shape = (batch, q.shape[2], q.shape[3], v.shape[3])
    if initial is None:
        initial = q.new_zeros(shape)
    elif initial.shape != shape:
        raise ValueError(f"initial: expected shape {list(shape)}, got shape {list(initial.shape)}")
    dtype = reduce(torch.promote_types, (part.dtype for part in (*x, initial)), torch.float32)
    x, initial = x.map(lambda part: part.to(dtype)), initial.to(dtype)

    if backend == "auto" and beyond_native():
        backend = "torch"

    def run(M: Tensor, x: Steps) -> tuple[Tensor, Tensor]:
        if method == "recurrent" or x.q.shape[1] == 1:
            return naive.run(M, x)
        return run_generalised_delta(M, x, backend=backend, chunk_size=chunk_size)

    with without_autocast(q):
        output, M = run(initial, x) if bounds is None else _packed(run, initial, x, bounds)
    return output.to(v.dtype), M


def _check_decays(log_decay: Tensor, method: str) -> None:
    """Refuse decays above one and, chunk by chunk, those whose inverse would overflow."""
    if torch.compiler.is_compiling() or log_decay.is_meta:
        return
    smallest, largest = (value.item() for value in torch.aminmax(values(log_decay)))
    if not largest <= 0:
        raise ValueError(f"log_decay: expected log-decays <= 0, got {largest:.6g}")
    if method == "chunk" and smallest < STRONGEST:
        raise ValueError(
            f'log_decay: expected at least {STRONGEST}, since 1/w is formed (or method="recurrent"), got {smallest:.6g}'
        )


def _check_shapes(x: Steps) -> None:
    if x.q.ndim != 4 or x.q.numel() == 0:
        raise ValueError(f"q: expected shape [B,T,H,D] with at least one element, got shape {list(x.q.shape)}")
    for name, part in x._asdict().items():
        wanted = (*x.q.shape[:3], part.shape[-1]) if name == "v" else x.q.shape
        if part.shape != wanted or part.numel() == 0:
            letters = f"[{', '.join(map(str, x.q.shape[:3]))}, M]" if name == "v" else f"{list(x.q.shape)}, as q has"
            raise ValueError(f"{name}: expected shape {letters}, got shape {list(part.shape)}")


def _packed(
    run: Callable[[Tensor, Steps], tuple[Tensor, Tensor]], M: Tensor, x: Steps, bounds: list[int]
) -> tuple[Tensor, Tensor]:
    """Sequences of like length together; where a shorter one has ended, zeros neither decay, remove nor write."""
    lengths = [end - start for start, end in pairwise(bounds)]
    outputs: dict[int, Tensor] = {}
    ends: dict[int, Tensor] = {}
    for batch in batches(lengths, PADDING):
        longest = max(lengths[n] for n in batch)

        def rows(part: Tensor, batch: list[int] = batch, longest: int = longest) -> Tensor:
            own = [part[:, bounds[n] : bounds[n + 1]] for n in batch]
            return torch.cat([F.pad(one, (0, 0, 0, 0, 0, longest - one.shape[1])) for one in own])

        output, end = run(M[batch], x.map(rows))
        for i, n in enumerate(batch):
            outputs[n], ends[n] = output[i : i + 1, : lengths[n]], end[i : i + 1]
    order = range(len(lengths))
    for n in order:
        if not lengths[n]:  # nothing happened to its memory
            outputs[n], ends[n] = x.v[:, :0], M[n : n + 1]
    return torch.cat([outputs[n] for n in order], 1), torch.cat([ends[n] for n in order])
