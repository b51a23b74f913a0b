r"""Hidden Markov chains in chunks: likelihoods and reads of a chunk at once, and four operations per token between.

The filter of a chain is sequential, because the normaliser of every token enters the next prediction. What does not
depend on the belief is computed for a whole chunk: the likelihoods E_t = exp(k_t v_tᵀ), scaled so that each column's
largest is 1, and afterwards all reads. Between them, in probabilities,

    b̄_t = a_t b_{t-1} + (1 − a_t)/D,     c_t = Σ_i b̄_t ⊙ E_t,     b_t = b̄_t ⊙ E_t / c_t.

Jumps keep b̄ above (1 − a_t)/D, so c_t cannot underflow. A chunk in which a token has (almost) no jumps is filtered in
log space instead, as the loop does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from membydesign import design as designs
from membydesign.filter.inputs import Run
from membydesign.filter.transforms import hidden, values

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design import Design
    from membydesign.filter.inputs import Inputs, Request

NAME, BACKEND = "torch, hidden Markov chains in chunks", "torch"


def why_not(design: Design, request: Request) -> str | None:
    """Why this kernel cannot filter the request; None if it can."""
    del request
    if type(design) is not designs.HiddenMarkov:
        return f"for {design.title}, since this kernel filters the chains of HiddenMarkov"
    return None


def run(design: Design, request: Request) -> Run:
    """Filter [B,T] in torch."""
    del design
    size, log_belief = request.tokens_in_chunk(16), request.initial.log_belief
    outputs, variances, evidences = [], [], []
    for start in range(0, request.x.q.shape[1], size):
        x = request.x.between(start, start + size)
        log_likelihood = x.k[..., :, None] * x.v[..., None, :]  # [B,C,H,D,M]
        stays = x.parameters["log_decay"][..., None, None]
        chunk = _in_probabilities if _jumps(stays, x) else _in_logarithms
        belief, log_belief, evidence = chunk(log_belief, log_likelihood, stays)
        q = x.q[..., None]
        mean = (belief * q).sum(-2)
        outputs.append(mean)
        evidences.append(evidence)
        if request.return_variance:
            variances.append((belief * (q - mean[..., None, :]).square()).sum(-2))
    variance = torch.cat(variances, 1) if variances else None
    return Run(torch.cat(outputs, 1), designs.StateBelief(log_belief), None, variance, torch.cat(evidences, 1))


def _jumps(log_stay: Tensor, x: Inputs) -> bool:
    """Whether every token of a chunk jumps with a probability that keeps all predictions above `FLOOR`."""
    from membydesign.design.hidden_markov import FLOOR

    return not hidden(log_stay) and -values(log_stay).max().expm1().item() / x.q.shape[-1] > FLOOR


def _in_probabilities(log_belief: Tensor, log_likelihood: Tensor, log_stay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Beliefs [B,C,H,D,M], the logarithm of the last one, and log densities [B,C,H]."""
    largest = log_likelihood.detach().amax(-2, keepdim=True)
    likelihoods = (log_likelihood - largest).exp().unbind(1)
    jumps = (-log_stay.expm1() / log_likelihood.shape[-2]).unbind(1)
    b, predicted, beliefs, normalisers = log_belief.exp(), log_belief, [], []
    for likelihood, stay, jump in zip(likelihoods, log_stay.exp().unbind(1), jumps, strict=True):
        predicted = torch.addcmul(jump, b, stay)
        joint = predicted * likelihood
        c = joint.sum(-2, keepdim=True)
        b = joint / c
        beliefs.append(b)
        normalisers.append(c)
    log_c = torch.stack(normalisers, 1).log() + largest
    last = predicted.log() + log_likelihood[:, -1] - log_c[:, -1]
    return torch.stack(beliefs, 1), last, log_c.sum((-2, -1))


def _in_logarithms(log_belief: Tensor, log_likelihood: Tensor, log_stay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in log space."""
    from membydesign.design.hidden_markov import log_predicted

    beliefs, normalisers = [], []
    for likelihood, stay in zip(log_likelihood.unbind(1), log_stay.unbind(1), strict=True):
        joint = log_predicted(log_belief, stay) + likelihood
        log_c = joint.logsumexp(-2, keepdim=True)
        log_belief = joint - log_c
        beliefs.append(log_belief)
        normalisers.append(log_c)
    return torch.stack(beliefs, 1).exp(), log_belief, torch.stack(normalisers, 1).sum((-2, -1))
