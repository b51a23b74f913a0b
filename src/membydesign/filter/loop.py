r"""The specification of every filter: predict, condition, read, for every token of any design.

All other kernels compute the same numbers faster and are tested against this loop. For the Bayesian Layer, one step is
`Transition.apply`, `Dense.predict`, `ObserveMemory.observe` and `DesignModel.condition` in `membydesign.design`:

    M̄_t = A_t M_{t-1},   P̄_t = A_t P_{t-1} A_tᵀ + ℓ_t² N          predict
    u_t = P̄_t k_t,   β_t = 1 / (r_t² + k_tᵀ u_t)                   condition: where the write lands, and how strongly
    M_t = M̄_t + β_t u_t (v_t − M̄_tᵀ k_t)ᵀ,   P_t = P̄_t − β_t u_t u_tᵀ
    y_t = M_tᵀ q_t,   variance q_tᵀ P_t q_t                         read
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from membydesign.design import Written
from membydesign.filter.inputs import Inputs, Request, Run

if TYPE_CHECKING:
    from membydesign.design import Design, Reading

NAME, BACKEND, STEP_NAME = "loop over tokens", "torch", "loop, one token"


def step(design: Design, state: Any, x: Inputs, t: int) -> tuple[Written, Reading]:
    """One token: the state drifts, takes in the write, and is read."""
    parameters = x.step(t)
    predicted = design.predict(state, parameters)
    written = Written(*design.condition(predicted, x.k[:, t], x.v[:, t], parameters))  # pyright: ignore
    return written, design.read(written.state, x.q[:, t], parameters)


def run(design: Design, request: Request) -> Run:
    """Every token in turn."""
    state, steps = request.initial, []
    for t in range(request.x.q.shape[1]):
        written, reading = step(design, state, request.x, t)
        state = written.state
        steps.append((reading.mean, written.precision, reading.variance, written.log_evidence))
    output, precision, variance, log_evidence = (
        None if parts[0] is None else torch.stack(parts, 1) for parts in zip(*steps, strict=True)
    )
    assert output is not None
    return Run(output, state, precision, variance, log_evidence)


def why_not(design: Design, request: Request) -> None:
    """The loop runs every design."""
