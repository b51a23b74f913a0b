"""Pieces of the Triton kernels: tiles, products, the factor of a chunk, turns of pairs of rows.

Tiles are powers of two; what lies beyond D, M or a row of pointers is read as 0 and never written.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLICE = tl.constexpr(16)
"""Terms of a product that a thread multiplies at a time: the fewest that `tl.dot` takes on Triton 3.5 to 3.7."""


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """A matrix product, accumulated in the type of its factors (float32, or float64).

    Without tensor cores ("ieee") a thread holds all terms of its entries at once, which are too many registers: long
    sums are cut into slices, that different threads take.
    """
    rows: tl.constexpr = a.shape[0]
    terms: tl.constexpr = a.shape[1]
    columns: tl.constexpr = b.shape[1]
    if PRECISION == "ieee" and terms > SLICE:
        slices: tl.constexpr = terms // SLICE
        left = tl.permute(tl.reshape(a, [rows, slices, SLICE]), [1, 0, 2])
        right = tl.reshape(b, [slices, SLICE, columns])
        return tl.sum(tl.dot(left, right, input_precision=PRECISION, out_dtype=a.dtype), 0)
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=a.dtype)


@triton.jit
def load(start, rows, columns, height: tl.constexpr, width: tl.constexpr):
    """The tile [rows, columns] of a matrix [height, width] that lies row by row."""
    at = start + rows[:, None] * width + columns[None, :]
    if tl.constexpr(height) % rows.shape[0] == 0 and tl.constexpr(width) % columns.shape[0] == 0:
        return tl.load(at)
    return tl.load(at, mask=(rows[:, None] < height) & (columns[None, :] < width), other=0.0)


@triton.jit
def store(start, x, rows, columns, height: tl.constexpr, width: tl.constexpr):
    """Write a tile, as `load` reads it."""
    at = start + rows[:, None] * width + columns[None, :]
    if tl.constexpr(height) % rows.shape[0] == 0 and tl.constexpr(width) % columns.shape[0] == 0:
        tl.store(at, x)
    else:
        tl.store(at, x, mask=(rows[:, None] < height) & (columns[None, :] < width))


@triton.jit
def factor(G, C: tl.constexpr):
    """L⁻¹ and the squares of the pivots, L_ττ², of G = L Lᵀ, from the lower triangle of G [C,C].

    C steps of elimination without roots, applied to G and to the identity side by side: G = N⁻¹ diag(p) N⁻ᵀ and
    L⁻¹ = diag(p)^-½ N. A pivot that is not positive is returned as it is, and 1 is taken instead of it.
    """
    t = tl.arange(0, C)
    N = tl.where(t[:, None] == t[None, :], 1.0, 0.0).to(G.dtype)
    pivots = tl.zeros([C], G.dtype)
    for s in range(C):
        column = tl.sum(tl.where(t[None, :] == s, G, 0.0), 1)
        row = tl.sum(tl.where(t[:, None] == s, N, 0.0), 0)
        pivot = tl.sum(tl.where(t == s, column, 0.0), 0)
        pivots = tl.where(t == s, pivot, pivots)
        below = tl.where(t > s, column, 0.0)
        multiple = below / tl.where(pivot > 0, pivot, 1.0)
        N -= multiple[:, None] * row[None, :]
        G -= multiple[:, None] * below[None, :]
    roots = tl.sqrt(tl.where(pivots > 0, pivots, 1.0))
    return N / roots[:, None], pivots


@triton.jit
def precision_of(pivots, C: tl.constexpr):
    """β = 1/L_ττ², and −1 at the first position whose pivot is not positive; what follows it means nothing."""
    t = tl.arange(0, C)
    first = tl.min(tl.where(pivots <= 0, t, C), 0)
    return tl.where(t == first, -1.0, 1 / tl.where(pivots > 0, pivots, 1.0))


@triton.jit
def partner_sign(rows):
    """−1 for the first row of a pair and 1 for the second."""
    return tl.where(rows % 2 == 0, -1.0, 1.0)


@triton.jit
def turned_rows(x, start, rows, columns, height, width, cos, sin):
    """The rows of a tile x turned in pairs by an angle with cos and sin [rows]; x itself was written to `start`."""
    other = load(start, rows ^ 1, columns, height, width)
    return cos[:, None] * x + (partner_sign(rows) * sin)[:, None] * other


@triton.jit
def turned_square(x, start, rows, columns, D, cos_rows, sin_rows, cos, sin):
    """Rows and columns of a tile x of a matrix [D,D] turned in pairs; x itself was written to `start`."""
    row, column = partner_sign(rows) * sin_rows, partner_sign(columns) * sin
    beside = load(start, rows, columns ^ 1, D, D)
    below = load(start, rows ^ 1, columns, D, D)
    across = load(start, rows ^ 1, columns ^ 1, D, D)
    once = (cos_rows[:, None] * column[None, :]) * beside + (row[:, None] * cos[None, :]) * below
    return (cos_rows[:, None] * cos[None, :]) * x + once + (row[:, None] * column[None, :]) * across


@triton.jit
def noise_tile(rows, columns, noise, across, D, MIXED: tl.constexpr):
    """What process noise built up by the chunk's end, as a tile of a matrix: a diagonal, or a block for each pair."""
    diagonal = tl.load(noise + rows, mask=rows < D, other=0.0)
    tile = tl.where(rows[:, None] == columns[None, :], diagonal[:, None], 0.0)
    if MIXED:
        beside = tl.load(across + rows, mask=rows < D, other=0.0)
        tile += tl.where((rows ^ 1)[:, None] == columns[None, :], beside[:, None], 0.0)
    return tile
