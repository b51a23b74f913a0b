"""An oracle from outside the recursion: condition the joint Gaussian of all memories and writes.

Everything the design draws (the first memory, all process noise or all write coefficients) is stacked into one vector z
with a block-diagonal prior covariance C. Memories and writes are linear in z: S_t = F_t z and v_s = y_s z + noise.
One dense linear solve then gives the belief at t. Nothing is predicted or updated, and nothing is shared with the
filters but the assumptions themselves: A_t and Q_t, as dense matrices, come from the transition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from membydesign.design import DesignModel, Drift, Step

if TYPE_CHECKING:
    from membydesign.belief import Belief
    from membydesign.testing.problems import Problem


class Conditioned(NamedTuple):
    """The exact belief after every token: mean [T,D,M], covariance [T,G,D,D], and log p(v) of all writes, []."""

    mean: Tensor
    covariance: Tensor
    log_evidence: Tensor


def transition_matrices(problem: Problem, b: int, h: int) -> list[Tensor]:
    """A_t as dense matrices: what `Transition.apply` does to the identity."""
    assert isinstance(problem.design, DesignModel)
    eye = torch.eye(problem.q.shape[-1], dtype=torch.float64)
    return [problem.design.transition.apply(eye[None, None], step)[0, 0] for step in _steps(problem, b, h)]


def noise_matrices(problem: Problem, b: int, h: int) -> list[Tensor]:
    """Q_t as dense matrices."""
    assert isinstance(problem.design, DesignModel)
    like = problem.q[b : b + 1, 0, h : h + 1, :, None]
    return [problem.design.transition.noise_covariance(like, step)[0, 0] for step in _steps(problem, b, h)]


def _steps(problem: Problem, b: int, h: int) -> list[Step]:
    """The step parameters of every token, [1,1,...]."""
    rows = slice(b, b + 1), slice(h, h + 1)
    return [
        Step({name: x[rows[0], t, rows[1]] for name, x in problem.parameters.items()}, problem.k[rows[0], t, rows[1]])
        for t in range(problem.q.shape[1])
    ]


def condition(problem: Problem, b: int, h: int, initial: Belief | None = None) -> Conditioned:
    """The exact belief of batch entry b and head h after every token."""
    design = problem.design
    assert isinstance(design, DesignModel)
    T, D, M = problem.q.shape[1], problem.q.shape[-1], problem.v.shape[-1]
    G = design.groups
    k, v = problem.k[b, :, h], problem.v[b, :, h]
    if initial is None:
        initial = design.prior(problem.sizes, dtype=torch.float64, device="cpu")
    A = transition_matrices(problem, b, h)
    noise = design.write.noise(problem.parameters)
    assert noise is not None, "the joint Gaussian needs the noise of writes"
    r2 = noise[b, :, h].reshape(T, -1).expand(T, G)
    observes_memory = design.write.observes_memory

    # S_t = F_t z, with z = (S_0, w_1, …, w_T) or (S_0, φ_1, …, φ_T).
    columns = D if observes_memory else 1
    F = [torch.cat([torch.eye(D, dtype=torch.float64), torch.zeros(D, columns * T, dtype=torch.float64)], 1)]
    for t in range(T):
        drifted = A[t] @ F[-1]
        entered = torch.zeros_like(drifted)
        start = D + columns * t
        entered[:, start : start + columns] = torch.eye(D) if observes_memory else k[t, :, None]
        F.append(drifted + entered)
    F = F[1:]
    if observes_memory:
        drawn = noise_matrices(problem, b, h) if design.has_process_noise else []
        Y = torch.stack([k[t] @ F[t] for t in range(T)])
    else:
        drawn = [lam.reshape(1, 1) for lam in problem.parameters["prior_variance"][b, :, h]]
        Y = torch.zeros(T, D + T, dtype=torch.float64)
        Y[:, D:] = torch.eye(T)

    means, covariances = torch.zeros(T, D, M, dtype=torch.float64), torch.zeros(T, G, D, D, dtype=torch.float64)
    log_evidence = torch.zeros((), dtype=torch.float64)
    for g in range(G):
        P = torch.zeros(D, D) if initial.covariance is None else initial.covariance[b, h, g]
        own = slice(g * M // G, (g + 1) * M // G)
        start_mean = initial.mean[b, h, :, own]
        C = torch.block_diag(P.double(), *drawn)
        implied = not drawn  # process noise that depends on the covariance before it
        for t, step in enumerate(_steps(problem, b, h)):
            if implied:
                C = torch.block_diag(C, _implied_noise(design, P, A[t], step))
            known = C.shape[0]
            seen, Y_seen, F_t = slice(0, t + 1), Y[: t + 1, :known], F[t][:, :known]
            z_mean = torch.zeros(known, M // G, dtype=torch.float64)
            z_mean[:D] = start_mean
            covariance_of_writes = Y_seen @ C @ Y_seen.T + torch.diag(r2[seen, g])
            surprise = v[seen, own] - Y_seen @ z_mean
            weights = torch.linalg.solve(covariance_of_writes, Y_seen @ C @ F_t.T).T
            means[t, :, own] = F_t @ z_mean + weights @ surprise
            P = covariances[t, g] = F_t @ C @ F_t.T - weights @ Y_seen @ C @ F_t.T
            if t == T - 1:
                zero = torch.zeros(T, dtype=torch.float64)
                writes = torch.distributions.MultivariateNormal(zero, covariance_of_writes)
                log_evidence = log_evidence + writes.log_prob(surprise.T).sum()
    return Conditioned(means, covariances, log_evidence)


def _implied_noise(design: DesignModel, P: Tensor, A: Tensor, step: Step) -> Tensor:
    """Q_t of a covariance that drifts in its own way, given the covariance before it."""
    Q = design.covariance.implied_noise(P[None, None, None], Drift(lambda x: A @ x), step)
    assert Q is not None, "the joint Gaussian needs the process noise"
    return Q[0, 0, 0]
