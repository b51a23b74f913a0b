"""The forward kernel of the dense filter: one program for each batch entry, head and noise group walks the chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from membydesign.filter.triton.parts import (
    factor,
    load,
    noise_tile,
    precision_of,
    product,
    store,
    turned_rows,
    turned_square,
)


@triton.jit
def read_and_write(
    M, k, q, X, W, inverse, f, values, output, error, t, columns, m,
    C: tl.constexpr, ERROR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """E = L⁻¹ (V − K̃ M₀) and O = Q̃ M₀ + W E of some value columns; returns f_C M₀ + Xᵀ E."""
    V = load(values, t, columns, C, m)
    E = product(inverse, V - product(k, M, PRECISION), PRECISION)
    store(output, product(q, M, PRECISION) + product(W, E, PRECISION), t, columns, C, m)
    if ERROR:
        store(error, E, t, columns, C, m)
    return f[:, None] * M + product(tl.trans(X), E, PRECISION)


@triton.jit
def forward_kernel(
    keys, queries, exits, built_up, cross, write_noise, values, decay, noise, across, cos, sin,
    beliefs_M, beliefs_P, output, error, precision, variance, observed, scratch, K, G,
    D: tl.constexpr, m: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr,
    P_RESIDENT: tl.constexpr, M_RESIDENT: tl.constexpr, ROTATES: tl.constexpr, MIXED: tl.constexpr,
    VARIANCE: tl.constexpr, ERROR: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk form of `chunk.py`, in its letters; N programs, N = B·H·G.

    Shared by groups: keys, queries, exits [B·H,K,C,D], built_up, cross [B·H,K,C,C], decay, noise, across, cos, sin
    [B·H,K,D]. Of each group: write_noise, precision, variance, observed (the diagonal of G) [N,K,C], values, output,
    error [N,K,C,m], scratch [N,C,D]. beliefs_M and beliefs_P are [N,K+1,D,m] and [N,K+1,D,D] if beliefs are saved;
    else [N,1,...], in which the belief is kept in place. The first of them is where the filter starts.
    """
    n = tl.program_id(0).to(tl.int64)
    head = n // G
    t, d = tl.arange(0, C), tl.arange(0, BD)
    lower = t[:, None] >= t[None, :]
    first = n * (K + 1) if SAVE else n
    scratch += n * C * D
    if P_RESIDENT:
        P = load(beliefs_P + first * D * D, d, d, D, D)
    if M_RESIDENT:
        c = tl.arange(0, BM)
        M = load(beliefs_M + first * D * m, d, c, D, m)
    for i in tl.range(K, disable_licm=True):
        at, own = head * K + i, n * K + i
        P_now, M_now = beliefs_P + (first + i * SAVE) * D * D, beliefs_M + (first + i * SAVE) * D * m
        P_next, M_next = beliefs_P + (first + (i + 1) * SAVE) * D * D, beliefs_M + (first + (i + 1) * SAVE) * D * m
        k, q = load(keys + at * C * D, t, d, C, D), load(queries + at * C * D, t, d, C, D)
        f = tl.load(decay + at * D + d, mask=d < D, other=0.0)

        # U = K̃ P₀, and Q̃ P₀ for variances
        if P_RESIDENT:
            U = product(k, P, PRECISION)
            if VARIANCE:
                reads = product(q, P, PRECISION)
        else:
            U = tl.zeros([C, BD], k.dtype)
            reads = tl.zeros([C, BD], k.dtype)
            for start in tl.range(0, D, BI, disable_licm=True):
                rows = start + tl.arange(0, BI)
                panel = load(P_now, rows, d, D, D)
                U += product(load(keys + at * C * D, t, rows, C, D), panel, PRECISION)
                if VARIANCE:
                    reads += product(load(queries + at * C * D, t, rows, C, D), panel, PRECISION)

        # G = L Lᵀ, W = tril(H L⁻ᵀ), X = L⁻¹ J
        r2 = tl.load(write_noise + own * C + t)
        Gram = product(U, tl.trans(k), PRECISION) + load(built_up + at * C * C, t, t, C, C)
        Gram += tl.where(t[:, None] == t[None, :], r2[:, None], 0.0)
        H = product(q, tl.trans(U), PRECISION) + load(cross + at * C * C, t, t, C, C)
        J = U * f[None, :] + load(exits + at * C * D, t, d, C, D)
        if VARIANCE:
            read_variance = tl.sum(reads * q, 1)
        tl.store(observed + own * C + t, tl.sum(tl.where(t[:, None] == t[None, :], Gram, 0.0), 1))
        inverse, pivots = factor(Gram, C)
        tl.store(precision + own * C + t, precision_of(pivots, C))
        W = tl.where(lower, product(H, tl.trans(inverse), PRECISION), 0.0)
        X = product(inverse, J, PRECISION)
        if VARIANCE:
            tl.store(variance + own * C + t, read_variance - tl.sum(W * W, 1))
        if ROTATES:
            cosine = tl.load(cos + at * D + d, mask=d < D, other=1.0)
            sine = tl.load(sin + at * D + d, mask=d < D, other=0.0)

        # O, E and M; K̃ and Q̃ anew, since as factors of products they take many registers
        tl.debug_barrier()
        k, q = load(keys + at * C * D, t, d, C, D), load(queries + at * C * D, t, d, C, D)
        if M_RESIDENT:
            M = read_and_write(M, k, q, X, W, inverse, f, values + own * C * m, output + own * C * m,
                               error + own * C * m, t, c, m, C, ERROR, PRECISION)  # fmt: skip
            if ROTATES:
                store(M_next, M, d, c, D, m)
                tl.debug_barrier()
                M = turned_rows(M, M_next, d, c, D, m, cosine, sine)
                tl.debug_barrier()
            if SAVE:
                store(M_next, M, d, c, D, m)
        else:
            for start in tl.range(0, m, BM, disable_licm=True):
                columns = start + tl.arange(0, BM)
                tile = load(M_now, d, columns, D, m)
                tile = read_and_write(tile, k, q, X, W, inverse, f, values + own * C * m, output + own * C * m,
                                      error + own * C * m, t, columns, m, C, ERROR, PRECISION)  # fmt: skip
                if ROTATES:
                    tl.debug_barrier()
                    store(M_next, tile, d, columns, D, m)
                    tl.debug_barrier()
                    tile = turned_rows(tile, M_next, d, columns, D, m, cosine, sine)
                tl.debug_barrier()  # a belief in place was read by all before it is written
                store(M_next, tile, d, columns, D, m)
            tl.debug_barrier()

        # P = f_C P₀ f_C + n_C − Xᵀ X
        if P_RESIDENT:
            P = (f[:, None] * f[None, :]) * P + noise_tile(d, d, noise + at * D, across + at * D, D, MIXED)
            P -= product(tl.trans(X), X, PRECISION)
            if ROTATES:
                store(P_next, P, d, d, D, D)
                tl.debug_barrier()
                P = turned_square(P, P_next, d, d, D, cosine, sine, cosine, sine)
                tl.debug_barrier()
            if SAVE:
                store(P_next, P, d, d, D, D)
        else:
            store(scratch, X, t, d, C, D)
            tl.debug_barrier()
            for start in tl.range(0, D, BI, disable_licm=True):
                rows = start + tl.arange(0, BI)
                f_rows = tl.load(decay + at * D + rows, mask=rows < D, other=0.0)
                panel = (f_rows[:, None] * f[None, :]) * load(P_now, rows, d, D, D)
                panel += noise_tile(rows, d, noise + at * D, across + at * D, D, MIXED)
                panel -= product(tl.trans(load(scratch, t, rows, C, D)), X, PRECISION)
                tl.debug_barrier()  # a belief in place was read by all before it is written
                store(P_next, panel, rows, d, D, D)
                if ROTATES:
                    tl.debug_barrier()
                    cos_rows = tl.load(cos + at * D + rows, mask=rows < D, other=1.0)
                    sin_rows = tl.load(sin + at * D + rows, mask=rows < D, other=0.0)
                    panel = turned_square(panel, P_next, rows, d, D, cos_rows, sin_rows, cosine, sine)
                    tl.debug_barrier()
                    store(P_next, panel, rows, d, D, D)
            tl.debug_barrier()  # what comes next reads the belief, and writes the scratch
    if not SAVE:
        if P_RESIDENT:
            store(beliefs_P + first * D * D, P, d, d, D, D)
        if M_RESIDENT:
            store(beliefs_M + first * D * m, M, d, c, D, m)
