"""The backward kernel of the dense filter: the inside of each chunk is computed anew, from the last to the first.

d… is the gradient of …; those of symmetric matrices are symmetric.
"""

from __future__ import annotations

import triton
import triton.language as tl

from membydesign.filter.triton.parts import (
    factor,
    load,
    partner_sign,
    product,
    store,
    turned_rows,
    turned_square,
)


@triton.jit
def mean_back(
    dM, M0, keys, queries, X, W, inverse, f, values, d_output, d_error, d_values, dX, dk, dq, dW, Z, df, t, d, columns,
    m: tl.constexpr, D: tl.constexpr, C: tl.constexpr, EVIDENCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Through O, E and M of some value columns: dM₀, and dX, dk̃, dq̃, dW, Lᵀ dL and df with what they add."""
    k, q = load(keys, t, d, C, D), load(queries, t, d, C, D)
    V, dO = load(values, t, columns, C, m), load(d_output, t, columns, C, m)
    E = product(inverse, V - product(k, M0, PRECISION), PRECISION)
    dE = product(tl.trans(W), dO, PRECISION) + product(X, dM, PRECISION)
    if EVIDENCE:
        dE += load(d_error, t, columns, C, m)
    dV = product(tl.trans(inverse), dE, PRECISION)
    store(d_values, dV, t, columns, C, m)
    dX += product(E, tl.trans(dM), PRECISION)
    dW += product(dO, tl.trans(E), PRECISION)
    Z += product(dE, tl.trans(E), PRECISION)
    dk -= product(dV, tl.trans(M0), PRECISION)
    dq += product(dO, tl.trans(M0), PRECISION)
    df += tl.sum(dM * M0, 1)
    dM = f[:, None] * dM - product(tl.trans(k), dV, PRECISION) + product(tl.trans(q), dO, PRECISION)
    return dM, dX, dk, dq, dW, Z, df


@triton.jit
def square_back(
    dP, rows, d, f_rows, f, P0, k_rows, k, dU_rows, dU, q_rows, q, weight, df, d_noise, d_across, D,
    ROWS_ARE_ALL: tl.constexpr, MIXED: tl.constexpr, VARIANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of dP₀ from those of dP, before any turn; writes dn, and returns df with what it adds."""
    tl.store(d_noise + rows, tl.sum(tl.where(rows[:, None] == d[None, :], dP, 0.0), 1), mask=rows < D)
    if MIXED:
        tl.store(d_across + rows, tl.sum(tl.where((rows ^ 1)[:, None] == d[None, :], dP, 0.0), 1), mask=rows < D)
    faded = dP * f_rows[:, None]
    if ROWS_ARE_ALL:
        df += 2 * tl.sum(dP * f[None, :] * load(P0, rows, d, D, D), 1)
    else:  # by columns, since dP and P₀ are symmetric
        df += 2 * tl.sum(faded * load(P0, rows, d, D, D), 0)
    dP = faded * f[None, :]
    dP += 0.5 * product(tl.trans(k_rows), dU, PRECISION)
    dP += 0.5 * product(tl.trans(dU_rows), k, PRECISION)
    if VARIANCE:
        dP += product(tl.trans(q_rows * weight[:, None]), q, PRECISION)
    return dP, df


@triton.jit
def backward_kernel(
    keys, queries, exits, built_up, cross, write_noise, values, decay, cos, sin, beliefs_M, beliefs_P,
    d_output, d_error, d_precision, d_variance, d_M, d_P,
    d_keys, d_queries, d_exits, d_built_up, d_cross, d_write_noise, d_values, d_decay, d_noise, d_across, d_angle,
    scratch, K, G,
    D: tl.constexpr, m: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BI: tl.constexpr,
    P_RESIDENT: tl.constexpr, M_RESIDENT: tl.constexpr, ROTATES: tl.constexpr, MIXED: tl.constexpr,
    VARIANCE: tl.constexpr, EVIDENCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of what `forward_kernel` takes, those that groups share for each group apart: [N,K,...].

    d_M [N,D,m] and d_P [N,D,D] hold the gradients of the belief at the end, and then of that at the start. d_angle
    [N,K,D] are two terms for each pair, whose sum is the gradient of the angle Θ_C. scratch is [N,4,C,D].
    """
    n = tl.program_id(0).to(tl.int64)
    head, first = n // G, n * (K + 1)
    t, d = tl.arange(0, C), tl.arange(0, BD)
    diagonal, lower = t[:, None] == t[None, :], t[:, None] >= t[None, :]
    d_M += n * D * m
    d_P += n * D * D
    scratch += n * 4 * C * D
    if P_RESIDENT:
        dP = load(d_P, d, d, D, D)
    if M_RESIDENT:
        c = tl.arange(0, BM)
        dM = load(d_M, d, c, D, m)
    for back in tl.range(K, disable_licm=True):
        i = K - 1 - back
        at, own = head * K + i, n * K + i
        P0, M0 = beliefs_P + (first + i) * D * D, beliefs_M + (first + i) * D * m

        # Out of the turn at the chunk's end
        angle = tl.zeros([BD], keys.dtype.element_ty)
        if ROTATES:
            cosine = tl.load(cos + at * D + d, mask=d < D, other=1.0)
            sine = -tl.load(sin + at * D + d, mask=d < D, other=0.0)
            P_next, M_next = P0 + D * D, M0 + D * m
            if P_RESIDENT:
                angle += 2 * tl.sum(dP * load(P_next, d ^ 1, d, D, D), 1)
                store(d_P, dP, d, d, D, D)
                tl.debug_barrier()
                dP = turned_square(dP, d_P, d, d, D, cosine, sine, cosine, sine)
            else:
                for start in tl.range(0, D, BI, disable_licm=True):
                    rows = start + tl.arange(0, BI)
                    panel = load(d_P, rows, d, D, D)
                    angle += 2 * tl.sum(panel * load(P_next, rows, d ^ 1, D, D), 0)
                    cos_rows = tl.load(cos + at * D + rows, mask=rows < D, other=1.0)
                    sin_rows = -tl.load(sin + at * D + rows, mask=rows < D, other=0.0)
                    panel = turned_square(panel, d_P, rows, d, D, cos_rows, sin_rows, cosine, sine)
                    tl.debug_barrier()
                    store(d_P, panel, rows, d, D, D)
            if M_RESIDENT:
                angle += tl.sum(dM * load(M_next, d ^ 1, c, D, m), 1)
                store(d_M, dM, d, c, D, m)
                tl.debug_barrier()
                dM = turned_rows(dM, d_M, d, c, D, m, cosine, sine)
            else:
                for start in tl.range(0, m, BM, disable_licm=True):
                    columns = start + tl.arange(0, BM)
                    tile = load(d_M, d, columns, D, m)
                    angle += tl.sum(tile * load(M_next, d ^ 1, columns, D, m), 1)
                    tile = turned_rows(tile, d_M, d, columns, D, m, cosine, sine)
                    tl.debug_barrier()
                    store(d_M, tile, d, columns, D, m)
            tl.debug_barrier()
            tl.store(d_angle + own * D + d, angle * partner_sign(d), mask=d < D)

        # The inside of the chunk, as forward has it
        k, q = load(keys + at * C * D, t, d, C, D), load(queries + at * C * D, t, d, C, D)
        f = tl.load(decay + at * D + d, mask=d < D, other=0.0)
        if P_RESIDENT:
            U = product(k, load(P0, d, d, D, D), PRECISION)
        else:
            U = tl.zeros([C, BD], k.dtype)
            for start in tl.range(0, D, BI, disable_licm=True):
                rows = start + tl.arange(0, BI)
                U += product(load(keys + at * C * D, t, rows, C, D), load(P0, rows, d, D, D), PRECISION)
        r2 = tl.load(write_noise + own * C + t)
        Gram = product(U, tl.trans(k), PRECISION) + load(built_up + at * C * C, t, t, C, C)
        H = product(q, tl.trans(U), PRECISION) + load(cross + at * C * C, t, t, C, C)
        inverse, pivots = factor(Gram + tl.where(diagonal, r2[:, None], 0.0), C)
        W = tl.where(lower, product(H, tl.trans(inverse), PRECISION), 0.0)
        X = product(inverse, U * f[None, :] + load(exits + at * C * D, t, d, C, D), PRECISION)
        store(scratch + 3 * C * D, U, t, d, C, D)  # out of registers until it is needed

        # O, E and M; K̃ and Q̃ anew, since as factors of products they take many registers
        tl.debug_barrier()
        ks, qs = keys + at * C * D, queries + at * C * D
        dX, dk, dq = tl.zeros([C, BD], k.dtype), tl.zeros([C, BD], k.dtype), tl.zeros([C, BD], k.dtype)
        dW, Z, df = tl.zeros([C, C], k.dtype), tl.zeros([C, C], k.dtype), tl.zeros([BD], k.dtype)
        v, dv, do, de = values + own * C * m, d_values + own * C * m, d_output + own * C * m, d_error + own * C * m
        if M_RESIDENT:
            dM, dX, dk, dq, dW, Z, df = mean_back(
                dM, load(M0, d, c, D, m), ks, qs, X, W, inverse, f, v, do, de, dv, dX, dk, dq, dW, Z, df, t, d, c, m,
                D, C, EVIDENCE, PRECISION)  # fmt: skip
        else:
            for start in tl.range(0, m, BM, disable_licm=True):
                columns = start + tl.arange(0, BM)
                tile, dX, dk, dq, dW, Z, df = mean_back(
                    load(d_M, d, columns, D, m), load(M0, d, columns, D, m), ks, qs, X, W, inverse, f, v, do, de,
                    dv, dX, dk, dq, dW, Z, df, t, d, columns, m, D, C, EVIDENCE, PRECISION)  # fmt: skip
                tl.debug_barrier()
                store(d_M, tile, d, columns, D, m)
            tl.debug_barrier()
        store(d_keys + own * C * D, dk, t, d, C, D)
        store(d_queries + own * C * D, dq, t, d, C, D)
        dW = tl.where(lower, dW, 0.0)
        weight = tl.zeros([C], k.dtype)
        if VARIANCE:
            weight = tl.load(d_variance + own * C + t)
            dW -= 2 * weight[:, None] * W

        # X, through P = f_C P₀ f_C + n_C − Xᵀ X
        if P_RESIDENT:
            dX -= 2 * product(X, dP, PRECISION)
        else:
            store(scratch, X, t, d, C, D)
            tl.debug_barrier()
            for start in tl.range(0, D, BI, disable_licm=True):
                rows = start + tl.arange(0, BI)
                dX -= 2 * product(load(scratch, t, rows, C, D), load(d_P, rows, d, D, D), PRECISION)

        # L, of which Z = Lᵀ dL (but for its sign) is all that counts; then G, H and J
        Z += product(dX, tl.trans(X), PRECISION) + product(tl.trans(dW), W, PRECISION)
        if EVIDENCE:
            Z += tl.where(diagonal, (2 * tl.load(d_precision + own * C + t) / pivots)[:, None], 0.0)
        below = tl.where(t[:, None] > t[None, :], Z, 0.0)
        Z = tl.where(diagonal, Z, 0.0) + below + tl.trans(below)
        dG = -0.5 * product(tl.trans(inverse), product(Z, inverse, PRECISION), PRECISION)
        dJ = product(tl.trans(inverse), dX, PRECISION)
        dH = product(dW, inverse, PRECISION)
        tl.store(d_write_noise + own * C + t, tl.sum(tl.where(diagonal, dG, 0.0), 1))
        store(d_built_up + own * C * C, tl.where(lower, tl.where(diagonal, dG, 2 * dG), 0.0), t, t, C, C)
        store(d_cross + own * C * C, dH, t, t, C, C)
        store(d_exits + own * C * D, dJ, t, d, C, D)

        # K̃ and Q̃
        tl.debug_barrier()
        k, q = load(keys + at * C * D, t, d, C, D), load(queries + at * C * D, t, d, C, D)
        U = load(scratch + 3 * C * D, t, d, C, D)
        df += tl.sum(dJ * U, 0)
        along = product(dG, k, PRECISION)
        dU = f[None, :] * dJ + along + product(tl.trans(dH), q, PRECISION)
        along += dU
        dq = load(d_queries + own * C * D, t, d, C, D) + product(dH, U, PRECISION)
        dk = load(d_keys + own * C * D, t, d, C, D)
        if P_RESIDENT:
            before = load(P0, d, d, D, D)
            dk += product(along, before, PRECISION)
            if VARIANCE:
                dq += product(2 * weight[:, None] * q, before, PRECISION)
        else:
            store(scratch + C * D, along, t, d, C, D)
            store(scratch + 2 * C * D, dU, t, d, C, D)
            tl.debug_barrier()
            for start in tl.range(0, D, BI, disable_licm=True):
                rows = start + tl.arange(0, BI)
                panel = load(P0, rows, d, D, D)
                dk += product(load(scratch + C * D, t, rows, C, D), panel, PRECISION)
                if VARIANCE:
                    q_rows = load(queries + at * C * D, t, rows, C, D)
                    dq += product(2 * weight[:, None] * q_rows, panel, PRECISION)
        tl.debug_barrier()
        store(d_keys + own * C * D, dk, t, d, C, D)
        store(d_queries + own * C * D, dq, t, d, C, D)

        # P₀
        if P_RESIDENT:
            dP, df = square_back(dP, d, d, f, f, P0, k, k, dU, dU, q, q, weight, df, d_noise + own * D,
                                 d_across + own * D, D, True, MIXED, VARIANCE, PRECISION)  # fmt: skip
        else:
            for start in tl.range(0, D, BI, disable_licm=True):
                rows = start + tl.arange(0, BI)
                k_rows, q_rows = load(keys + at * C * D, t, rows, C, D), load(queries + at * C * D, t, rows, C, D)
                f_rows = tl.load(decay + at * D + rows, mask=rows < D, other=0.0)
                panel, df = square_back(
                    load(d_P, rows, d, D, D), rows, d, f_rows, f, P0, k_rows, k,
                    load(scratch + 2 * C * D, t, rows, C, D), dU, q_rows, q, weight, df, d_noise + own * D,
                    d_across + own * D, D, False, MIXED, VARIANCE, PRECISION)  # fmt: skip
                tl.debug_barrier()
                store(d_P, panel, rows, d, D, D)
            tl.debug_barrier()  # what comes next reads dP, and writes the scratch
        tl.store(d_decay + own * D + d, df, mask=d < D)
    if P_RESIDENT:
        store(d_P, dP, d, d, D, D)
    if M_RESIDENT:
        store(d_M, dM, d, c, D, m)
