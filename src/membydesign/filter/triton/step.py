"""One token of the dense filter as a Triton kernel, for decoding on a GPU: predict, write, read; without a gradient.

P and M are read once and written once; one program for each batch entry, head and noise group.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from membydesign.belief import Belief
from membydesign.filter.triton import support as triton_support
from membydesign.filter.triton import table
from membydesign.filter.triton.parts import load, partner_sign, store

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import RowDrift, RowNoise
    from membydesign.filter.linear import DenseInputs


@triton.jit
def predicted_rows(P, rows, d, decay, cos, sin, noise, D: tl.constexpr, ROTATES: tl.constexpr):
    """Rows of P̄ = A P Aᵀ + ℓ² N, [rows, d]."""
    tile = load(P, rows, d, D, D)
    if ROTATES:
        cos_rows, cos_all = tl.load(cos + rows, mask=rows < D, other=1.0), tl.load(cos + d, mask=d < D, other=1.0)
        row = partner_sign(rows) * tl.load(sin + rows, mask=rows < D, other=0.0)
        column = partner_sign(d) * tl.load(sin + d, mask=d < D, other=0.0)
        tile = cos_rows[:, None] * tile + row[:, None] * load(P, rows ^ 1, d, D, D)
        other = cos_rows[:, None] * load(P, rows, d ^ 1, D, D) + row[:, None] * load(P, rows ^ 1, d ^ 1, D, D)
        tile = cos_all[None, :] * tile + column[None, :] * other
    f_rows, f = tl.load(decay + rows, mask=rows < D, other=0.0), tl.load(decay + d, mask=d < D, other=0.0)
    l2 = tl.load(noise + rows, mask=rows < D, other=0.0)
    return tile * (f_rows[:, None] * f[None, :]) + tl.where(rows[:, None] == d[None, :], l2[:, None], 0.0)


@triton.jit
def step_kernel(
    q, k, v, write_noise, decay, noise, cos, sin, M, P, output, precision, next_M, next_P, G,
    D: tl.constexpr, m: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr,
    P_RESIDENT: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """The step of `naive.py`. q, k, decay, noise (ℓ² N), cos, sin [B·H,D]; v, output [N,m]; M [N,D,m]; P [N,D,D]."""
    n = tl.program_id(0).to(tl.int64)
    head, d = n // G, tl.arange(0, BD)
    decay += head * D
    noise += head * D
    cos += head * D
    sin += head * D
    P += n * D * D
    M += n * D * m
    next_P += n * D * D
    next_M += n * D * m
    key, query = tl.load(k + head * D + d, mask=d < D, other=0.0), tl.load(q + head * D + d, mask=d < D, other=0.0)

    # u = P̄ k and β; P̄ is symmetric
    u = tl.zeros([BD], key.dtype)
    if P_RESIDENT:
        predicted = predicted_rows(P, d, d, decay, cos, sin, noise, D, ROTATES)
        u += tl.sum(predicted * key[:, None], 0)
    else:
        for start in tl.range(0, D, BI):
            rows = start + tl.arange(0, BI)
            key_rows = tl.load(k + head * D + rows, mask=rows < D, other=0.0)
            u += tl.sum(predicted_rows(P, rows, d, decay, cos, sin, noise, D, ROTATES) * key_rows[:, None], 0)
    beta = 1 / (tl.load(write_noise + n) + tl.sum(key * u, 0))
    tl.store(precision + n, beta)

    # P = P̄ − β u uᵀ
    if P_RESIDENT:
        store(next_P, predicted - beta * (u[:, None] * u[None, :]), d, d, D, D)
    else:
        for start in tl.range(0, D, BI):
            rows = start + tl.arange(0, BI)
            panel = predicted_rows(P, rows, d, decay, cos, sin, noise, D, ROTATES)
            here = tl.sum(tl.where(rows[:, None] == d[None, :], u[None, :], 0.0), 1)
            store(next_P, panel - beta * (here[:, None] * u[None, :]), rows, d, D, D)

    # M = M̄ + β u (v − M̄ᵀ k)ᵀ and y = Mᵀ q
    f = tl.load(decay + d, mask=d < D, other=0.0)
    for start in tl.range(0, m, BM):
        columns = start + tl.arange(0, BM)
        tile = load(M, d, columns, D, m)
        if ROTATES:
            turn = partner_sign(d) * tl.load(sin + d, mask=d < D, other=0.0)
            tile = tl.load(cos + d, mask=d < D, other=1.0)[:, None] * tile
            tile += turn[:, None] * load(M, d ^ 1, columns, D, m)
        tile *= f[:, None]
        error = tl.load(v + n * m + columns, mask=columns < m, other=0.0) - tl.sum(tile * key[:, None], 0)
        tile += beta * u[:, None] * error[None, :]
        store(next_M, tile, d, columns, D, m)
        tl.store(output + n * m + columns, tl.sum(tile * query[:, None], 0), mask=columns < m)


def step_triton(
    drift: RowDrift, noise: RowNoise, belief: Belief, x: DenseInputs, *, fallback: bool = False
) -> tuple[Tensor, Belief, Tensor] | None:
    """The read-out [B,H,M], the new belief and the precision of the write [B,H,G].

    Args:
        drift: of one token, [B,1,H,...].
        noise: likewise, [B,1,H].
        belief: before the token.
        x: one token, without the axis T.
        fallback: return None if the kernel cannot be compiled or launched, rather than raise a `KernelError`.
    """
    B, H, D = x.q.shape
    G = x.write_noise.shape[-1]
    m = x.v.shape[-1] // G
    pairs = drift.angle
    decay = drift.of_rows()[:, 0].expand(B, H, D).exp()
    entering = noise.entering(drift)[:, 0].expand(B, H, D)
    cos, sin = (
        (entering, entering)
        if pairs is None
        else (f(pairs[:, 0]).repeat_interleave(2, -1) for f in (torch.cos, torch.sin))
    )
    mean = belief.mean.unflatten(-1, (G, -1)).movedim(-2, 2).contiguous()
    inputs = [t.contiguous() for t in (x.q, x.k, x.v, x.write_noise, decay, entering, cos, sin)]
    covariance = belief.covariance.contiguous()
    output, precision = torch.empty_like(inputs[2]), torch.empty_like(inputs[3])
    next_mean, next_covariance = torch.empty_like(mean), torch.empty_like(covariance)
    tiles = table.STEP[table.padded(D)][0]
    sizes = table.constants(tiles, D, m)
    sizes.pop("M_RESIDENT")  # the mean is read and written once, wherever it is

    def start() -> None:
        with torch.cuda.device_of(x.q) if x.q.is_cuda else nullcontext():  # Triton launches on the current device
            step_kernel[(B * H * G,)](
                *inputs, mean, covariance, output, precision, next_mean, next_covariance, G,
                D=D, m=m, **sizes, ROTATES=pairs is not None,
                num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True,
            )  # fmt: skip

    key = ("step", D, m, x.q.dtype, x.q.device, pairs is not None)
    if not triton_support.run("decoding", key, start, fallback=fallback):
        return None
    return output, Belief(next_mean.movedim(2, -2).flatten(-2), next_covariance), precision
