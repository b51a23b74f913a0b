"""An oracle from outside the recursion: condition the joint Gaussian of all memories and writes.

Everything the design draws (the first memory, all process noise or all write coefficients) is stacked into one vector z
with a block-diagonal prior covariance C. Memories and writes are linear in z: S_t = F_t z and v_s = y_s z + noise.
One dense linear solve then gives the belief at t. Nothing is predicted or updated, and nothing is shared with the
library: the matrices A_t are built here from their definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import membydesign as mbd
from membydesign import Belief
from problems import Problem


class Conditioned(NamedTuple):
    mean: Tensor  # [T,D,M]
    covariance: Tensor  # [T,G,D,D]
    log_evidence: Tensor  # []


def transition_matrices(problem: Problem, b: int, h: int) -> list[Tensor]:
    """A_t as dense matrices, from the definition of each transition."""
    T, D = problem.q.shape[1], problem.q.shape[-1]
    eye = torch.eye(D, dtype=torch.float64)
    decay = problem.parameters["log_decay"][b, :, h].exp() if "log_decay" in problem.parameters else None
    match problem.design.transition:
        case mbd.Identity():
            return [eye] * T
        case mbd.ScalarDecay():
            assert decay is not None
            return [a * eye for a in decay]
        case mbd.DiagonalDecay():
            assert decay is not None
            return [torch.diag(a) for a in decay]
        case mbd.DampedRotation():
            assert decay is not None
            angle = problem.parameters["angle"][b, :, h]
            blocks = [
                [
                    rho * torch.tensor([[c, -s], [s, c]])
                    for rho, c, s in zip(radii, angles.cos(), angles.sin(), strict=True)
                ]
                for radii, angles in zip(decay, angle, strict=True)
            ]
            return [torch.block_diag(*row) for row in blocks]
        case other:
            raise AssertionError(f"no definition of {other} here")


def noise_matrix(transition: mbd.Transition, D: int) -> Tensor:
    """N: the rows that process noise reaches."""
    if isinstance(transition, mbd.DampedRotation) and transition.noise == "real":
        return torch.diag(torch.tensor([1.0, 0.0] * (D // 2), dtype=torch.float64))
    return torch.eye(D, dtype=torch.float64)


def condition(problem: Problem, b: int, h: int, initial: Belief | None = None) -> Conditioned:
    """The exact belief of batch entry b and head h after every token."""
    design = problem.design
    T, D, M = problem.q.shape[1], problem.q.shape[-1], problem.v.shape[-1]
    G = design.write.groups
    k, v = problem.k[b, :, h], problem.v[b, :, h]
    if initial is None:
        initial = Belief.prior(design, problem.q.shape[0], problem.q.shape[2], D, M, dtype=torch.float64)
    A = transition_matrices(problem, b, h)
    r2 = problem.parameters["write_noise"][b, :, h].reshape(T, -1).expand(T, G)
    observes_memory = isinstance(design.write, mbd.ObserveMemory)

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
        noise = noise_matrix(design.transition, D)
        drawn = [l2 * noise for l2 in problem.parameters["process_noise"][b, :, h]]
        Y = torch.stack([k[t] @ F[t] for t in range(T)])
    else:
        drawn = [lam.reshape(1, 1) for lam in problem.parameters["prior_variance"][b, :, h]]
        Y = torch.zeros(T, D + T, dtype=torch.float64)
        Y[:, D:] = torch.eye(T)

    means, covariances = torch.zeros(T, D, M, dtype=torch.float64), torch.zeros(T, G, D, D, dtype=torch.float64)
    log_evidence = torch.zeros((), dtype=torch.float64)
    for g in range(G):
        P0 = torch.zeros(D, D) if initial.covariance is None else initial.covariance[b, h, g]
        C = torch.block_diag(P0.double(), *drawn)
        own = slice(g * M // G, (g + 1) * M // G)
        z_mean = torch.zeros(C.shape[0], M // G, dtype=torch.float64)
        z_mean[:D] = initial.mean[b, h, :, own]
        covariance_of_writes = Y @ C @ Y.T + torch.diag(r2[:, g])
        surprise = v[:, own] - Y @ z_mean
        for t in range(T):
            seen = slice(0, t + 1)
            weights = torch.linalg.solve(covariance_of_writes[seen, seen], Y[seen] @ C @ F[t].T).T
            means[t, :, own] = F[t] @ z_mean + weights @ surprise[seen]
            covariances[t, g] = F[t] @ C @ F[t].T - weights @ Y[seen] @ C @ F[t].T
        writes = torch.distributions.MultivariateNormal(torch.zeros(T, dtype=torch.float64), covariance_of_writes)
        log_evidence = log_evidence + writes.log_prob(surprise.T).sum()
    return Conditioned(means, covariances, log_evidence)
