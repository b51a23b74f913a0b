r"""The filters of all designs from their equations, in float64: token by token, with every matrix written out.

Nothing of the library is used here. The linear-Gaussian recursion is Proposition 1 of the paper,

    P̄ = A P Aᵀ + ℓ² N,   u = P̄ k,   β = 1/(r² + kᵀu),   M = (I − β u kᵀ) A M + β u vᵀ,   P = P̄ − β u uᵀ,

or with P̄ = A P Aᵀ + σ² (I − A Aᵀ) where noise is stationary; covariances that forget have
P̄ = γ A P Aᵀ + λ(I − γ A Aᵀ) or A P Aᵀ/δ, the delta rules replace P̄ by λI, and the additive rules observe the
coefficient φ ~ N(0, λI) of the write k φᵀ alone.

**How accurate a filter can be.** The first axis of every tensor counts replicas. Replica 0 is computed as it stands. In
the others every intermediate result is disturbed by relative errors of the size of one rounding in the type under test
(Monte Carlo arithmetic, D. S. Parker 1997). Their distance from replica 0 is what rounding does to this very problem,
with all its cancellations, and it is the unit in which `judging` measures the library. Gradients come from autograd
through the disturbed recursion, so that they are disturbed too.
"""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fuzzing.specs import Spec


class Rounding:
    """Relative errors of at most `eps` in all replicas but the first, independent ones in values and in gradients.

    The errors are slices of one pool of random numbers at random places, which is much faster than drawing each. A
    filter that goes token by token corrects an earlier error when it writes at the same key again; one that goes in
    chunks does not, so that its means are rounded relative to the largest mean on their way (`carried`).
    """

    def __init__(self, replicas: int, eps: float, seed: int, pool: int, *, chunked: bool) -> None:
        self.random, self.chunked = Random(seed), chunked
        noise = torch.rand(replicas, pool, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        noise[0] = 0.5
        self.noise = eps * (2 * noise - 1)
        self.factor = 1 + self.noise

    def __call__(self, x: Tensor) -> Tensor:
        """x as the type under test may have rounded it; backward rounds its gradient."""
        result = x * self._drawn(self.factor, x)
        if x.requires_grad:  # the derivative of a rounded function would be that of a function nearby: too good
            return result + x.detach() * self._drawn(self.noise, x)
        return result

    def carried(self, mean: Tensor, largest: Tensor, uncorrected: Tensor) -> Tensor:
        """A mean as a filter in chunks may have rounded it.

        Args:
            mean: as it is.
            largest: that of all means before it, by which its error is scaled.
            uncorrected: the sum of all writes, as if no write had corrected another. It enters with a gradient and
                without a value, since the error of a gradient is scaled by that of uncorrected writes.
        """
        if not self.chunked:
            return mean
        noise = self._drawn(self.noise, mean)
        return mean + noise * (largest + uncorrected - uncorrected.detach())

    def conditioned(self, P: Tensor, largest: Tensor) -> Tensor:
        """A dense covariance as a filter in chunks may have rounded it.

        At the end of a chunk it is the difference of what memory would be without the writes of the chunk and of what
        they resolved, so that its error is scaled by the `largest` covariance before them.
        """
        return P + self._drawn(self.noise, P) * largest if self.chunked else P

    def _drawn(self, pool: Tensor, x: Tensor) -> Tensor:
        size = x[0].numel()
        place = self.random.randrange(pool.shape[1] - size)
        return pool[:, place : place + size].view(x.shape)


class State(NamedTuple):
    """M, [N,B,H,D,M], and what is kept of P: matrices [N,B,H,G,D,D], exposures [N,B,H,D] of counts, or None.

    `scale` has shape and rate of an unknown scale, [N,B,H,G] each.
    `largest` is the largest mean so far, as much of it as decays left, and `uncorrected` the sum of all writes;
    `largest_kept` is the largest dense covariance so far.
    """

    mean: Tensor
    kept: Tensor | None
    largest: Tensor | None = None
    uncorrected: Tensor | None = None
    largest_kept: Tensor | None = None
    scale: tuple[Tensor, Tensor] | None = None


def run(
    spec: Spec, x: Mapping[str, Tensor], state: State, rounded: Rounding, passed: list[Tensor]
) -> tuple[dict[str, Tensor], State]:
    """All results of a sequence.

    Args:
        spec: the design.
        x: q, k, v and the step parameters with all their axes, [N,B,T,H,...].
        state: before the first token.
        rounded: disturbs intermediate results.
        passed: collects all means and covariances on the way, to see how large their gradients are.

    Returns:
        Results [N,B,T,H,...] by name: output, variance, evidence and `trust` (β r², which rounding must not push above
        one); and the last state.
    """
    T = x["q"].shape[2]
    step = count_step if spec.write == "count" else scaled_step if spec.scaled else gaussian_step
    every: list[dict[str, Tensor]] = []
    for t in range(T):
        results, state = step(spec, {name: part[:, :, t] for name, part in x.items()}, state, rounded, passed)
        passed += [state.mean] if state.kept is None else [state.mean, state.kept]
        every.append(results)
    if not every:
        return {}, state
    return {name: torch.stack([results[name] for results in every], 2) for name in every[0]}, state


def transition_matrix(spec: Spec, x: Mapping[str, Tensor], rounded: Rounding) -> Tensor:
    """A_t, [N,B,H,D,D]."""
    D = x["q"].shape[-1]
    eye = torch.eye(D, dtype=torch.float64)
    if rounded.chunked and "log_decay" in x:  # chunks add up logarithms: each sum is rounded relative to all before it
        log_decay = x["log_decay"]
        x = {**x, "log_decay": log_decay + 4 * (rounded(log_decay) - log_decay).detach()}
    match spec.drift:
        case "identity":
            return eye.expand(*x["q"].shape[:-1], D, D)
        case "scalar":
            return rounded(x["log_decay"].exp())[..., None, None] * eye
        case "diagonal":
            return torch.diag_embed(rounded(x["log_decay"].exp()))
        case "rotation" | "rotation_real":
            radius = rounded(x["log_decay"].exp())
            cos, sin = rounded(radius * rounded(x["angle"].cos())), rounded(radius * rounded(x["angle"].sin()))
            even, odd = eye[0::2], eye[1::2]  # [D/2,D]: rows of the real and of the imaginary parts

            def placed(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
                return torch.einsum("...i,ia,ib->...ab", values, rows, columns)

            turned = placed(cos, even, even) + placed(cos, odd, odd)
            return turned + placed(sin, odd, even) - placed(sin, even, odd)
        case "removal":
            removed = rounded(x["removal"][..., :, None] * x["removal_key"][..., None, :])
            return torch.diag_embed(rounded(x["log_decay"].exp())) - removed
        case "feedback":
            fed_back = rounded(x["feedback"][..., None, None] * (x["k"][..., :, None] * x["k"][..., None, :]))
            return rounded(x["log_decay"].exp())[..., None, None] * eye - fed_back
        case "rwkv7":
            length = rounded(x["erase_key"].square().sum(-1, keepdim=True) + 1e-12).sqrt()
            key = rounded(x["erase_key"] / rounded(length))
            return torch.diag_embed(x["retention"]) - rounded((x["erase_rate"] * key)[..., :, None] * key[..., None, :])


def gaussian_step(
    spec: Spec, x: Mapping[str, Tensor], state: State, rounded: Rounding, passed: list[Tensor]
) -> tuple[dict[str, Tensor], State]:
    """One token of a linear-Gaussian design: [N,B,H,...]."""
    q, k, v = x["q"], x["k"], x["v"]
    A = transition_matrix(spec, x, rounded)
    mean = rounded(A @ rounded(state.mean))
    before = state.mean.detach().abs() if state.largest is None else state.largest
    largest = torch.maximum(A.detach().abs() @ before, mean.detach().abs())
    uncorrected = A @ (state.mean if state.uncorrected is None else state.uncorrected)
    passed.append(mean)
    if spec.write == "latent":
        return _additive(spec, x, A, State(mean, state.kept, largest, uncorrected), rounded)
    noise = x["write_noise"]  # [N,B,H,G]
    P = predicted_covariance(spec, x, A, state.kept, rounded)  # [N,B,H,G,D,D]
    passed.append(P)
    largest_kept = None
    if spec.keeps_matrix:
        largest_kept = P.detach().abs()
        if state.largest_kept is not None:
            drift = A.detach().abs()[..., None, :, :]
            largest_kept = torch.maximum(drift @ state.largest_kept @ drift.mT, largest_kept)
    u = rounded((P @ k[..., None, :, None])[..., 0])  # [N,B,H,G,D]
    along = rounded((u * k[..., None, :]).sum(-1))
    G = u.shape[-2]
    error = rounded(v - rounded((k[..., None, :] @ mean)[..., 0, :])).unflatten(-1, (G, -1))  # [N,B,H,G,M/G]
    squares = rounded(error.square().sum(-1))
    expected, columns = rounded(noise + along), error.shape[-1]
    if spec.write == "student_t":
        evidence = student_log_density(squares, expected, columns, spec.nu, rounded)
        noise = rounded(noise * (spec.nu + squares / columns / expected) / (spec.nu + 1))
        expected = rounded(noise + along)
        precision = rounded(1 / expected)
    else:
        precision = rounded(1 / expected)
        # log β is as exact as β is: its error is absolute
        log_precision = (precision / (2 * math.pi)).log()
        evidence = rounded(0.5 * (rounded(columns * log_precision) - rounded(precision * squares))).sum(-1)
    gain = rounded(precision[..., None] * u)
    change = torch.einsum("...gd,...gm->...dgm", gain, error).flatten(-2)
    written = torch.einsum("...gd,...gm->...dgm", gain, v.unflatten(-1, (G, -1))).flatten(-2)
    uncorrected = uncorrected + written
    mean = rounded.carried(rounded(mean + rounded(change)), largest, uncorrected)
    if spec.kept in ("reset", "column_reset"):
        variance, kept = reset_variance(P[..., 0, 0], noise, q, k, rounded), None
    else:
        P = rounded(P - rounded(gain[..., :, None] * u[..., None, :]))
        if largest_kept is not None:
            P = rounded.conditioned(P, largest_kept)
        kept = truncated(spec, P)
        variance = rounded((rounded(kept * q[..., None, None, :]) * q[..., None, :, None]).sum((-2, -1)))
    output = rounded((q[..., None, :] @ mean)[..., 0, :])
    results = {"output": output, "variance": variance, "evidence": evidence, "trust": noise * precision}
    if spec.scaled:
        results |= {"squares": rounded(precision * squares), "precision": precision}
    return results, State(mean, kept, largest, uncorrected, largest_kept)


def scaled_step(
    spec: Spec, x: Mapping[str, Tensor], state: State, rounded: Rounding, passed: list[Tensor]
) -> tuple[dict[str, Tensor], State]:
    """One token of a design whose variances are all divided by τ ~ Gamma(a, b): a += m/2, b += ½ β‖e‖² for m columns.

    Values then have a multivariate Student-t distribution with 2a degrees of freedom and the scale b/(a β) I, and the
    variance of a read is b/(a − 1) times that without a scale.
    """
    assert state.scale is not None
    results, new = gaussian_step(spec, x, state, rounded, passed)
    a, b = state.scale
    if spec.discounted_scale:
        kept = x["discount"][..., None]
        a, b = rounded(kept * a), rounded(kept * b)
    squares, precision = results.pop("squares"), results.pop("precision")
    m = x["v"].shape[-1] // squares.shape[-1]
    # log Γ(a + m/2) − log Γ(a) is as exact as its larger part
    gamma = rounded(torch.lgamma(a + m / 2)) - rounded(torch.lgamma(a))
    peak = gamma + m / 2 * rounded((precision / (2 * math.pi * b)).log())
    results["evidence"] = rounded(peak - rounded((a + m / 2) * rounded(torch.log1p(squares / (2 * b))))).sum(-1)
    a, b = rounded(a + m / 2), rounded(b + squares / 2)
    results["variance"] = rounded(rounded(b / (a - 1)) * results["variance"])
    return results, new._replace(scale=(a, b))


def predicted_covariance(
    spec: Spec, x: Mapping[str, Tensor], A: Tensor, kept: Tensor | None, rounded: Rounding
) -> Tensor:
    """P̄ of every group, [N,B,H,G,D,D]."""
    D = x["q"].shape[-1]
    eye = torch.eye(D, dtype=torch.float64)
    if spec.kept in ("reset", "column_reset"):
        prior = x["prior_variance"] if spec.kept == "column_reset" else x["prior_variance"][..., None]
        groups = max(prior.shape[-1], spec.groups)
        return prior.expand(*prior.shape[:-1], groups)[..., None, None] * eye
    assert kept is not None
    P = drifted(A, kept, rounded)
    if spec.kept == "discounted":
        return rounded(P * rounded((-x["log_discount"]).exp())[..., None, None, None])
    if spec.kept == "partial_reset":
        gamma, prior = (x[name][..., None, None, None] for name in ("retention", "prior_variance"))
        left = rounded(eye - rounded(gamma * (A @ A.mT)[..., None, :, :]))
        return rounded(rounded(gamma * P) + rounded(prior * left))
    if not spec.has_process_noise:
        return P
    if spec.stationary:
        taken = rounded(eye - rounded(A @ A.mT))
        return rounded(P + (x["stationary_variance"][..., None, None] * taken)[..., None, :, :])
    rows = eye.diagonal().clone()
    if spec.drift == "rotation_real":
        rows[1::2] = 0
    return rounded(P + x["process_noise"][..., None, None, None] * torch.diag(rows))


def drifted(A: Tensor, P: Tensor, rounded: Rounding) -> Tensor:
    """A P Aᵀ for every group."""
    A = A[..., None, :, :]
    return rounded(rounded(A @ rounded(P)) @ A.mT)


def truncated(spec: Spec, P: Tensor) -> Tensor:
    """What is kept of P, as a matrix."""
    D = P.shape[-1]
    match spec.kept:
        case "diagonal":
            return P * torch.eye(D, dtype=P.dtype)
        case "block" | "example_block":
            block = torch.arange(D) // spec.size
            return P * (block[:, None] == block[None, :])
        case _:
            return P


def reset_variance(prior: Tensor, noise: Tensor, q: Tensor, k: Tensor, rounded: Rounding) -> Tensor:
    """qᵀ(λI − λ²kkᵀ/(r² + λ‖k‖²))q without cancellation, by Lagrange's identity.

    ‖q‖²‖k‖² − (qᵀk)² = ½ Σ_ij (q_i k_j − q_j k_i)², so that it is (½ λ Σ(…)² + ‖q‖² r²) / (‖k‖² + r²/λ). Where ‖k‖²
    is below r²/λ, its gradient by r² would cancel in that form, and the plain difference loses nothing.
    """
    cross = rounded(q[..., :, None] * k[..., None, :])
    area = rounded(0.5 * (cross - cross.mT).square().sum((-2, -1)))[..., None]
    squared_q, squared_k = q.square().sum(-1, keepdim=True), k.square().sum(-1, keepdim=True)
    split = (prior * area + squared_q * noise) / (squared_k + noise / prior)
    along = rounded((q * k).sum(-1, keepdim=True))
    lowered = prior * (squared_q - along.square() / (squared_k + noise / prior))
    return rounded(torch.where(squared_k > noise / prior, split, lowered))


def _additive(
    spec: Spec, x: Mapping[str, Tensor], A: Tensor, state: State, rounded: Rounding
) -> tuple[dict[str, Tensor], State]:
    """φ ~ N(0, λI), S = A S + k φᵀ, v | φ ~ N(φ, r²I): M = A M + ω k vᵀ and P = A P Aᵀ + ω r² k kᵀ, ω = λ/(λ + r²)."""
    mean, kept, largest, uncorrected = state[:4]
    q, k, v = x["q"], x["k"], x["v"]
    assert largest is not None
    assert uncorrected is not None
    prior, noise = x["prior_variance"], x["write_noise"]
    total = rounded(prior + noise)
    trust = rounded(prior / total)
    change = rounded(trust[..., None, None] * k[..., :, None] * v[..., None, :])
    uncorrected = uncorrected + change
    mean = rounded.carried(rounded(mean + change), largest, uncorrected)
    results = {
        "output": rounded((q[..., None, :] @ mean)[..., 0, :]),
        "evidence": rounded(-0.5 * (v.shape[-1] * (2 * math.pi * total).log() + rounded(v.square().sum(-1) / total))),
    }
    if spec.kept == "nothing":
        return results, State(mean, None, largest, uncorrected)
    assert kept is not None
    left = rounded(trust * noise)[..., None, None] * k[..., :, None] * k[..., None, :]
    P = rounded(drifted(A, kept, rounded) + left[..., None, :, :])
    results["variance"] = rounded((rounded(P * q[..., None, None, :]) * q[..., None, :, None]).sum((-2, -1)))
    return results, State(mean, P, largest, uncorrected)


def student_log_density(squares: Tensor, scale: Tensor, columns: int, nu: float, rounded: Rounding) -> Tensor:
    """log of the multivariate t density with ν degrees of freedom and scale s, summed over groups."""
    constant = math.lgamma((nu + columns) / 2) - math.lgamma(nu / 2) - columns / 2 * math.log(nu * math.pi)
    density = (
        constant - columns / 2 * rounded(scale.log()) - (nu + columns) / 2 * rounded((1 + squares / (nu * scale)).log())
    )
    return rounded(density).sum(-1)


def count_step(
    spec: Spec, x: Mapping[str, Tensor], state: State, rounded: Rounding, passed: list[Tensor]
) -> tuple[dict[str, Tensor], State]:
    """Rates λ_ij ~ Gamma(a_ij, b_i), forgotten by δ, that k_i v_j events in the time k_i update: negative binomial."""
    del spec, passed
    q, k, v = x["q"], x["k"], x["v"]
    assert state.kept is not None
    decay = rounded(x["log_decay"].exp())
    a, b = rounded(decay[..., None, None] * state.mean), rounded(decay[..., None] * state.kept)
    counts = rounded(k[..., :, None] * v[..., None, :])
    new_a, new_b = rounded(a + counts), rounded(b + k)
    shape = rounded(rounded(torch.lgamma(new_a)) - rounded(torch.lgamma(a)) - rounded(torch.lgamma(counts + 1)))
    # p(n) = Γ(a + n)/(Γ(a) n!) (b/(b + k))^a (k/(b + k))^n
    missed = rounded(a * rounded(torch.log1p(k / b))[..., None])
    seen = torch.where(k > 0, k, 1.0).log() - new_b.log()
    evidence = rounded(rounded(shape - missed) + rounded(counts * rounded(seen)[..., None]))
    rates = rounded(new_a / new_b[..., None])
    results = {
        "output": rounded((q[..., None] * rates).sum(-2)),
        "variance": rounded((rounded(q.square()[..., None] * rates) / new_b[..., None]).sum(-2)),
        "evidence": evidence.sum((-2, -1)),
    }
    return results, State(new_a, new_b)
