r"""The paper's closed forms as functions: what a propagated covariance does, predicted without simulation.

All assume unit-norm keys and, unless stated otherwise, memory that does not decay ($A_t = I$) and constant variances
$\ell^2$ (`process_noise`) and $r^2$ (`write_noise`). $\rho = k_A^\top k_B$ is the overlap of two keys; barred variances
are predicted ($\bar\sigma^2 = k^\top \bar P k$), plain ones posterior ($\sigma^2 = k^\top P k$).

Scalars are floats. Covariances, keys and read-outs are tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


def _check_variances(**variances: float) -> None:
    for name, value in variances.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a finite variance of at least 0, got {value!r}")


def _check_overlap(overlap: float) -> None:
    if not -1 <= overlap <= 1:
        raise ValueError(f"overlap: expected a cosine between -1 and 1, got {overlap!r}")


# --- Gains ---


def gain(predicted_variance: float, write_noise: float) -> float:
    r"""The scalar write gain $g = \bar\sigma^2/(r^2 + \bar\sigma^2) \in [0, 1)$ of a write along its own key.

    The read-out at the written key moves by this share of its error. It is also the posterior variance along the
    key in units of the write noise: $\sigma^2(k_t) = r^2 g_t$.
    """
    return predicted_variance / (write_noise + predicted_variance)


def reset_gain(prior_variance: float, write_noise: float, squared_norm: float = 1.0) -> float:
    r"""The delta rule's step size $\eta = \lambda/(r^2 + \lambda\lVert k\rVert^2)$ (Proposition 2)."""
    return prior_variance / (write_noise + prior_variance * squared_norm)


def write_noise_of_gate(gate: Tensor, k: Tensor, prior_variance: Tensor | float = 1.0) -> Tensor:
    r"""The write noise at which a delta rule has gate $\eta = \beta$: $r^2 = \lambda(1/\beta - \lVert k\rVert^2)$.

    A delta rule states its write strength β directly. A gate with $\beta \lVert k\rVert^2 \ge 1$ reaches or overshoots
    the written value, which no observation noise can explain; it raises an error. A sigmoid gate can saturate to 1,
    sooner in half precision: clamp it below $1/\lVert k\rVert^2$.

    Args:
        gate: β, [...].
        k: keys, [..., D].
        prior_variance: λ, [...] or a number.

    Returns:
        $r^2$, [...].
    """
    noise = 1 / gate - k.square().sum(-1)
    if not torch.compiler.is_compiling() and not bool((noise > 0).all()):
        worst = (gate * k.square().sum(-1)).max().item()
        raise ValueError(f"gate: expected values > 0 with gate·‖k‖² < 1, got gate·‖k‖² up to {worst:.6g}")
    return prior_variance * noise


def trust(prior_variance: float, write_noise: float) -> float:
    r"""The additive write weight $\omega = \lambda/(\lambda + r^2)$ of the latent-input model."""
    return prior_variance / (prior_variance + write_noise)


# --- Writing the same key again and again (Corollary 4) ---


def same_key_predicted_variance(process_noise: float, write_noise: float) -> float:
    r"""The stationary predicted variance along a key when only that key is written.

    The positive root of $x^2 - \ell^2 x - r^2\ell^2 = 0$,
    $\bar\sigma_\infty^2 = \tfrac12\bigl(\ell^2 + \sqrt{\ell^4 + 4 r^2 \ell^2}\bigr)$.
    """
    _check_variances(process_noise=process_noise, write_noise=write_noise)
    return (process_noise + math.sqrt(process_noise**2 + 4 * write_noise * process_noise)) / 2


def same_key_posterior_variance(process_noise: float, write_noise: float) -> float:
    r"""The stationary posterior variance, $\sigma_\infty^2 = \bar\sigma_\infty^2 - \ell^2$.

    It satisfies $\sigma_\infty^2(\sigma_\infty^2 + \ell^2) = r^2\ell^2$.
    """
    if process_noise == 0:
        return 0.0  # without drift, repeated writes remove all uncertainty
    predicted = same_key_predicted_variance(process_noise, write_noise)
    return write_noise * process_noise / predicted  # equal, without the cancellation


def steady_gain(process_noise: float, write_noise: float) -> float:
    r"""The floor to which the gain of repeated writes decays: `gain` at $\bar\sigma_\infty^2$."""
    return gain(same_key_predicted_variance(process_noise, write_noise), write_noise)


def steady_gain_slow_drift(process_noise: float, write_noise: float) -> float:
    r"""The limit of `steady_gain` for $\ell^2 \ll r^2$: $\sqrt{\ell^2/r^2}$, long memory."""
    return math.sqrt(process_noise / write_noise)


def steady_gain_fast_drift(process_noise: float, write_noise: float) -> float:
    r"""The limit of `steady_gain` for $\ell^2 \gg r^2$: $1 - r^2/\ell^2$, near-full replacement.

    The paper prints $1 - r^2/(2\ell^2)$. Expanding the root gives $\bar\sigma_\infty^2 = \ell^2 + r^2 + O(r^4/\ell^2)$
    and with it $g^{ss} = 1 - r^2/\ell^2 + O(r^4/\ell^4)$: the factor 2 is a slip (docs/concepts/theory.md).
    """
    return 1 - write_noise / process_noise


# --- Writing one key, observing another (Proposition 3) ---


class CrossKeyBalance(NamedTuple):
    r"""The effect of one write along $k_A$ on the uncertainty along $k_B$.

    Attributes:
        change: $\Delta_B = k_B^\top P_t k_B - k_B^\top P_{t-1} k_B = \ell^2 - \text{contraction}$.
        contraction: $(k_B^\top\bar P_t k_A)^2/(r^2 + \bar\sigma_A^2)
            = \bar\sigma_B^2\,\rho_{\bar P}(k_A,k_B)^2\,\bar\sigma_A^2/(r^2+\bar\sigma_A^2)$.
        bound: $\bar\sigma_B^2\,\bar\sigma_A^2/(r^2+\bar\sigma_A^2)$, which the contraction never exceeds.
        predicted_variance: $\bar\sigma_B^2$, which the bound never exceeds.
    """

    change: float
    contraction: float
    bound: float
    predicted_variance: float


def covariance_weighted_correlation(predicted_covariance: Tensor, k_A: Tensor, k_B: Tensor) -> float:
    r"""$\rho_{\bar P}(k_A,k_B) = k_B^\top\bar P k_A/\sqrt{\bar\sigma_A^2\bar\sigma_B^2}$, and 0 where a variance is 0.

    Args:
        predicted_covariance: $\bar P$, [D,D].
        k_A: [D].
        k_B: [D].
    """
    variances = (k_A @ predicted_covariance @ k_A).item() * (k_B @ predicted_covariance @ k_B).item()
    return (k_B @ predicted_covariance @ k_A).item() / math.sqrt(variances) if variances > 0 else 0.0


def cross_key_balance(
    predicted_covariance: Tensor, k_A: Tensor, k_B: Tensor, process_noise: float, write_noise: float
) -> CrossKeyBalance:
    r"""Contraction and replenishment along $k_B$ when $k_A$ is written (both unit-norm, $A_t = I$).

    Args:
        predicted_covariance: $\bar P_t = P_{t-1} + \ell^2 I$, [D,D].
        k_A: the written key, [D].
        k_B: the observed key, [D].
        process_noise: $\ell^2$.
        write_noise: $r^2$.
    """
    variance_A = (k_A @ predicted_covariance @ k_A).item()
    variance_B = (k_B @ predicted_covariance @ k_B).item()
    contraction = (k_B @ predicted_covariance @ k_A).item() ** 2 / (write_noise + variance_A)
    return CrossKeyBalance(
        change=process_noise - contraction,
        contraction=contraction,
        bound=variance_B * gain(variance_A, write_noise),
        predicted_variance=variance_B,
    )


class VarianceParts(NamedTuple):
    r"""The variance along $k_B = \rho k_A + \sqrt{1-\rho^2}\,e_\perp$ in parts, which add up to $k_B^\top P k_B$.

    Attributes:
        along: $\rho^2\, k_A^\top P k_A$, which writes of A resolve.
        cross: $2\rho\sqrt{1-\rho^2}\; k_A^\top P e_\perp$, which vanishes under many writes of A.
        perpendicular: $(1-\rho^2)\, e_\perp^\top P e_\perp$, which writes of A do not reach.
    """

    along: float
    cross: float
    perpendicular: float


def variance_parts(covariance: Tensor, k_A: Tensor, k_B: Tensor) -> VarianceParts:
    r"""Split the variance along $k_B$ into what it shares with $k_A$ and what it does not.

    Args:
        covariance: P, [D,D].
        k_A: unit norm, [D].
        k_B: unit norm, [D].
    """
    overlap = k_A @ k_B
    shared, rest = overlap * k_A, k_B - overlap * k_A
    return VarianceParts(
        along=(shared @ covariance @ shared).item(),
        cross=(2 * shared @ covariance @ rest).item(),
        perpendicular=(rest @ covariance @ rest).item(),
    )


def crowding_rate(overlap: float, process_noise: float) -> float:
    r"""How fast uncertainty along $k_B$ grows per step while $k_A$ is written: $(1-\rho^2)\ell^2$ (Corollary 4)."""
    _check_overlap(overlap)
    _check_variances(process_noise=process_noise)
    return (1 - overlap**2) * process_noise


# --- After many writes of B, the first write of A ---


def boundary_gain(overlap: float, write_noise: float, variance_B: float, variance_perp: float) -> float:
    r"""The gain $g_{A|B}$ of the first write of A after a long run of writes of B.

    In the basis of $k_B$ and $e_\perp$, with predicted variances $\bar\sigma_B^2$ and $\bar\sigma_\perp^2$ and no
    correlation between them, $k_A = \rho k_B + \sqrt{1-\rho^2}\,e_\perp$ has the variance
    $x = \rho^2\bar\sigma_B^2 + (1-\rho^2)\bar\sigma_\perp^2$, and $g_{A|B} = x/(r^2 + x)$.
    """
    _check_overlap(overlap)
    _check_variances(write_noise=write_noise, variance_B=variance_B, variance_perp=variance_perp)
    return gain(overlap**2 * variance_B + (1 - overlap**2) * variance_perp, write_noise)


BOUNDARY_GAIN_CEILING = 1.0
r"""The limit of `boundary_gain` as $\bar\sigma_\perp^2 \to \infty$: the first write replaces the old value."""


def warped_key_angle(overlap: float, variance_B: float, variance_perp: float) -> float:
    r"""The angle (radians) between $k_A$ and its warped key $u = \bar P k_A$ after a long run of writes of B.

    $$\cos\theta = \frac{\rho^2\bar\sigma_B^2 + (1-\rho^2)\bar\sigma_\perp^2}
    {\sqrt{\rho^2\bar\sigma_B^4 + (1-\rho^2)\bar\sigma_\perp^4}}$$

    A reset or constant-gain update has angle 0 always, since $u \propto k$.
    """
    _check_overlap(overlap)
    _check_variances(variance_B=variance_B, variance_perp=variance_perp)
    # atan2 of the components of u across and along k_A: exact near 0, where acos is not.
    across = overlap * math.sqrt(1 - overlap**2) * (variance_perp - variance_B)
    along = overlap**2 * variance_B + (1 - overlap**2) * variance_perp
    return abs(math.atan2(across, along))


def warped_key_angle_limit(overlap: float) -> float:
    r"""The limit of `warped_key_angle` as $\bar\sigma_\perp^2/\bar\sigma_B^2 \to \infty$: $\arcsin|\rho|$."""
    return math.asin(abs(overlap))


# --- Read-outs under repeated writes ---


def same_key_contraction(predicted_variance: float, process_noise: float, write_noise: float, writes: int) -> float:
    r"""The share of the error that is left after repeated writes of one key and value: $\prod_{s=1}^n (1-g_s)$.

    $M_n^\top k - v = \prod_s (1-g_s)\,(M_0^\top k - v)$, where $g_s = x_s/(r^2+x_s)$ and the predicted variance obeys
    $x_{s+1} = r^2x_s/(r^2+x_s) + \ell^2$.

    Args:
        predicted_variance: $x_1 = k^\top\bar P k$ at the first of these writes.
        process_noise: $\ell^2$.
        write_noise: $r^2 > 0$.
        writes: n.
    """
    _check_variances(predicted_variance=predicted_variance, process_noise=process_noise, write_noise=write_noise)
    if write_noise == 0:
        raise ValueError("write_noise: expected a variance > 0, got 0")
    left, x = 1.0, predicted_variance
    for _ in range(writes):
        kept = 1 - gain(x, write_noise)
        left *= kept
        x = kept * x + process_noise
    return left


def additive_readout(b0: Tensor, v_A: Tensor, overlap: float, strength: float, writes: int) -> Tensor:
    r"""Linear attention's read-out at $k_B$ after n writes of A: $b_n = b_0 + n\gamma\rho v_A$.

    It has no limit: with one-hot values $b_n(B) - b_n(A) \to -\infty$ for $\rho > 0$, so retrieval of B goes to 0.

    Args:
        b0: the read-out at $k_B$ before those writes, [M].
        v_A: the value written, [M].
        overlap: $\rho$.
        strength: $\gamma$, what each write is multiplied by.
        writes: n.

    Returns:
        $b_n$, [M].
    """
    _check_overlap(overlap)
    return b0 + writes * strength * overlap * v_A


# --- Plateaus of panel (a) of the collision figure ---


def pairwise_retrieval(target: float, distractor: float) -> float:
    r"""The pairwise softmax $p = e^{b(B)}/(e^{b(A)} + e^{b(B)})$ of a target's and a distractor's read-out."""
    return (1 + math.tanh((target - distractor) / 2)) / 2


def retrieval_margin(target: float, distractor: float) -> float:
    r"""The retrieval margin $\Delta = p_B - p_A = 2p - 1 \in [-1, 1]$ of the pairwise softmax."""
    return math.tanh((target - distractor) / 2)


TARGET_WRITE_PLATEAU = pairwise_retrieval(1.0, 0.0)
r"""$(1 + e^{-1})^{-1} \approx 0.731$: retrieval when the read-out at $k_B$ has converged to the one-hot value of B."""


def delta_plateau(a0: Tensor, b0: Tensor, v_A: Tensor, overlap: float) -> Tensor:
    r"""The limit of a delta rule's read-out at $k_B$ under endless writes of A: $b_\infty = b_0 - \rho(a_0 - v_A)$.

    Args:
        a0: the read-out at $k_A$ before those writes, [M].
        b0: the read-out at $k_B$ before those writes, [M].
        v_A: the value written, [M].
        overlap: $\rho$.

    Returns:
        $b_\infty$, [M], for any constant gain in (0, 1).
    """
    return b0 - overlap * (a0 - v_A)


def bayesian_plateau(
    covariance: Tensor,
    a0: Tensor,
    b0: Tensor,
    v_A: Tensor,
    k_A: Tensor,
    k_B: Tensor,
    *,
    process_noise: float,
    write_noise: float,
    tolerance: float = 1e-15,
) -> Tensor:
    r"""The limit of the Bayesian Layer's read-out at $k_B$ under endless writes of $(k_A, v_A)$.

    $$b_\infty = b_0 + \sum_{s\ge1} \eta_s^B \Bigl(\prod_{j<s}(1-\eta_j^A)\Bigr)(v_A - a_0),$$

    with $\eta^A_n = x_n/(r^2+x_n)$ and $\eta^B_n = (\rho x_n + c_n)/(r^2+x_n)$, where the predicted variance
    $x_n = k_A^\top\bar P k_A$ and the cross-covariance $c_n = k_B^\top(\bar P k_A - x_n k_A)$ obey scalar recursions,
    $x_{n+1} = r^2x_n/(r^2+x_n) + \ell^2$ and $c_{n+1} = r^2c_n/(r^2+x_n)$. No D×D matrix is iterated.

    Args:
        covariance: P before those writes, [D,D].
        a0: the read-out at $k_A$ before those writes, [M].
        b0: the read-out at $k_B$ before those writes, [M].
        v_A: the value written, [M].
        k_A: the written key, unit norm, [D].
        k_B: the queried key, unit norm, [D].
        process_noise: $\ell^2 > 0$; at 0 the series would converge too slowly to be summed term by term.
        write_noise: $r^2$.
        tolerance: threshold of the product at which the series is truncated.

    Returns:
        $b_\infty$, [M].
    """
    for name, value in (("process_noise", process_noise), ("write_noise", write_noise)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a finite variance > 0, got {value!r}")
    overlap = (k_A @ k_B).item()
    predicted_key = covariance @ k_A + process_noise * k_A
    x = (k_A @ predicted_key).item()
    c = (k_B @ predicted_key).item() - overlap * x
    weight, remaining = 0.0, 1.0
    while remaining > tolerance:
        weight += (overlap * x + c) / (write_noise + x) * remaining
        kept = write_noise / (write_noise + x)  # 1 − η^A
        remaining *= kept
        c *= kept
        x = kept * x + process_noise
    return b0 + weight * (v_A - a0)


# --- Capacity ---


def capacity(D: int) -> int:
    r"""The number of associations a read-out $\hat v = M^\top k$ can hold exactly, for any update: D (Remark 2)."""
    return D


def is_exactly_recallable(keys: Tensor) -> bool:
    r"""Whether every assignment of values to these keys can be recalled exactly: the n keys are linearly independent.

    $K^\top M = V$ has a solution for every V if and only if rank K = n, which needs n ≤ D.

    Args:
        keys: [n,D].
    """
    return bool(torch.linalg.matrix_rank(keys) == keys.shape[0])
