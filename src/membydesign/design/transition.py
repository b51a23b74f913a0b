r"""How memory drifts between two writes: $S_t \mid S_{t-1} \sim \mathcal N(A_t S_{t-1},\ \ell_t^2 N)$.

Four final classes, one for each form of $A_t$ in the paper. A transition of your own derives from `Transition` and
says three things: which parameters it asks of a step, what $A_t x$ is, and its equation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from membydesign.design.equations import Equation, StepParameter


class RowDrift(NamedTuple):
    r"""A drift that is a decay of each row, or a damped turn of each interleaved pair of rows.

    Attributes:
        log_decay: logarithms of the decays, at most 0: [B,T,H,1] shared by all rows, or [B,T,H,D]; or, with an angle,
            [B,T,H,D/2] for pairs of rows.
        angle: turn of each pair in radians, [B,T,H,D/2], or None.
    """

    log_decay: Tensor
    angle: Tensor | None = None

    def of_rows(self) -> Tensor:
        """The decays of rows, [B,T,H,1] or [B,T,H,D]."""
        pairs = self.angle is not None and 1 < self.log_decay.shape[-1] == self.angle.shape[-1]
        return self.log_decay.repeat_interleave(2, -1) if pairs else self.log_decay

    def of_pairs(self) -> Tensor:
        """The decays of the pairs of rows that turn, [B,T,H,D/2]."""
        assert self.angle is not None
        each_row = self.log_decay.shape[-1] == 2 * self.angle.shape[-1]
        return self.log_decay[..., 0::2] if each_row else self.log_decay.expand_as(self.angle)


class Transition(ABC):
    r"""The drift of memory, $S_t \mid S_{t-1} \sim \mathcal N(A_t S_{t-1},\ \ell_t^2 N)$.

    $A_t$ is D×D, $N$ is a diagonal of ones (and zeros, for rows that never receive process noise).
    """

    step_parameters: ClassVar[tuple[StepParameter, ...]] = ()
    multiplications_per_entry: ClassVar[int] = 1

    @property
    @abstractmethod
    def matrix(self) -> Equation:
        """The equation of A_t."""

    @abstractmethod
    def apply(self, x: Tensor, log_decay: Tensor | None, angle: Tensor | None) -> Tensor:
        r"""$A_t x$, along the axis of D.

        Args:
            x: [..., D, n].
            log_decay: this step's parameter, [...] with the last axis that `step_parameters` declares.
            angle: likewise.

        Returns:
            [..., D, n].
        """

    @property
    def process_noise_shape(self) -> Equation:
        """The equation of N, the rows that process noise reaches."""
        return Equation("I", r"\mathbf{I}")

    def noise_rows(self, memory: Tensor) -> Tensor:
        """The diagonal of N, [D]: one where process noise enters; in the type of memory, [..., D, n]."""
        return memory.new_ones(memory.shape[-2])

    def per_row(self, log_decay: Tensor | None, angle: Tensor | None, like: Tensor) -> RowDrift | None:
        r"""The same drift as a decay of each row and a turn of each pair of rows, if it is of that form.

        Fast filters need it: they work with decays accumulated over many steps. None (the default) says that $A_t$ is
        of another form, and only the loop over tokens can run it.

        Args:
            log_decay: the parameter of a whole sequence, [B,T,H] with the last axis that `step_parameters` declares.
            angle: likewise.
            like: keys, [B,T,H,D].
        """
        del log_decay, angle, like
        return None

    def refuse_key_size(self, D: int) -> str | None:
        """What D must be, if this transition cannot act on D rows ("an even D, since …"); None if it can."""
        del D
        return None


@final
@dataclass(frozen=True)
class Identity(Transition):
    r"""Memory does not fade: $A_t = I$. Only process noise moves it.

    Step parameters: none.
    """

    multiplications_per_entry = 0

    @property
    def matrix(self) -> Equation:
        """A_t = I."""
        return Equation("A_t = I", r"\mathbf{A}_t = \mathbf{I}")

    def apply(self, x: Tensor, log_decay: Tensor | None = None, angle: Tensor | None = None) -> Tensor:
        """X itself, [..., D, n]."""
        del log_decay, angle
        return x

    def per_row(self, log_decay: Tensor | None, angle: Tensor | None, like: Tensor) -> RowDrift:
        """No decay: zeros, [B,T,H,1]."""
        del log_decay, angle
        return RowDrift(like.new_zeros(*like.shape[:-1], 1))


@final
@dataclass(frozen=True)
class ScalarDecay(Transition):
    r"""All of memory fades at one rate: $A_t = a_t I$ with $a_t = e^{\texttt{log\_decay}_t} \in (0, 1]$.

    Step parameters: `log_decay` [B,T,H], at most 0.
    """

    step_parameters = (StepParameter("log_decay", "log a_t", bound="<= 0"),)

    @property
    def matrix(self) -> Equation:
        """A_t = a_t I."""
        return Equation("A_t = a_t I", r"\mathbf{A}_t = a_t \mathbf{I}")

    def apply(self, x: Tensor, log_decay: Tensor | None, angle: Tensor | None = None) -> Tensor:
        """a_t x, with log_decay [...]; x [..., D, n]."""
        assert log_decay is not None
        del angle
        return log_decay.exp()[..., None, None] * x

    def per_row(self, log_decay: Tensor | None, angle: Tensor | None, like: Tensor) -> RowDrift:
        """One decay for all rows, [B,T,H,1]."""
        assert log_decay is not None
        del angle, like
        return RowDrift(log_decay[..., None])


@final
@dataclass(frozen=True)
class DiagonalDecay(Transition):
    r"""Every key dimension fades at its own rate: $A_t = \mathrm{diag}(\alpha_t)$, $\alpha_t \in (0, 1]^D$.

    Step parameters: `log_decay` [B,T,H,D], at most 0.
    """

    step_parameters = (StepParameter("log_decay", "log α_t", last_axis="D", bound="<= 0"),)

    @property
    def matrix(self) -> Equation:
        """A_t = diag(α_t)."""
        return Equation("A_t = diag(α_t)", r"\mathbf{A}_t = \mathrm{diag}(\boldsymbol{\alpha}_t)")

    def apply(self, x: Tensor, log_decay: Tensor | None, angle: Tensor | None = None) -> Tensor:
        """α_t ⊙ x, with log_decay [..., D]; x [..., D, n]."""
        assert log_decay is not None
        del angle
        return log_decay.exp()[..., None] * x

    def per_row(self, log_decay: Tensor | None, angle: Tensor | None, like: Tensor) -> RowDrift:
        """A decay of each row, [B,T,H,D]."""
        assert log_decay is not None
        del angle, like
        return RowDrift(log_decay)


@final
@dataclass(frozen=True)
class DampedRotation(Transition):
    r"""Pairs of rows turn and fade, as complex eigenvalues $\rho_t e^{i\theta_t}$ do.

    $$A_t = \mathrm{blockdiag}_i\ \rho_{t,i}
    \begin{pmatrix}\cos\theta_{t,i} & -\sin\theta_{t,i}\\ \sin\theta_{t,i} & \cos\theta_{t,i}\end{pmatrix}$$

    Rows 2i and 2i+1 are the real and the imaginary part of pair i, so D counts rows and must be even. To write and
    read the real rows only, as the paper's implementation does, pass keys and queries through `real_rows`.

    Step parameters: `log_decay` [B,T,H,D/2], log ρ, at most 0; `angle` [B,T,H,D/2], θ in radians.

    Args:
        noise: "all" lets process noise into every row, N = I; "real" into the real rows only, N = diag(1,0,1,0,…),
            which keeps imaginary rows that no write observes from inflating.
    """

    noise: Literal["all", "real"] = "all"

    step_parameters = (
        StepParameter("log_decay", "log ρ_t", last_axis="D/2", bound="<= 0"),
        StepParameter("angle", "θ_t", last_axis="D/2"),
    )
    multiplications_per_entry = 2

    def __post_init__(self) -> None:
        if self.noise not in ("all", "real"):
            raise ValueError(f'DampedRotation(noise): expected "all" or "real", got {self.noise!r}')

    @property
    def matrix(self) -> Equation:
        """A_t = blockdiag(ρ_t R(θ_t))."""
        return Equation(
            "A_t = blockdiag(ρ_t R(θ_t))",
            r"\mathbf{A}_t = \mathrm{blockdiag}(\rho_t \mathbf{R}(\theta_t))",
        )

    @property
    def process_noise_shape(self) -> Equation:
        """N = I, or diag(1,0,1,0,…) for noise="real"."""
        if self.noise == "all":
            return Equation("I", r"\mathbf{I}")
        return Equation("diag(1,0,…,1,0)", r"\mathrm{diag}(1,0,\ldots,1,0)")

    def apply(self, x: Tensor, log_decay: Tensor | None, angle: Tensor | None) -> Tensor:
        """Each pair of rows turned by θ and scaled by ρ; log_decay and angle [..., D/2], x [..., D, n]."""
        assert log_decay is not None
        assert angle is not None
        radius = log_decay.exp()
        cos, sin = (radius * angle.cos())[..., None], (radius * angle.sin())[..., None]
        real, imaginary = x[..., 0::2, :], x[..., 1::2, :]
        turned = torch.stack((cos * real - sin * imaginary, sin * real + cos * imaginary), dim=-2)
        return turned.flatten(-3, -2)

    def per_row(self, log_decay: Tensor | None, angle: Tensor | None, like: Tensor) -> RowDrift:
        """The radius and the angle of each pair, [B,T,H,D/2]."""
        assert log_decay is not None
        del like
        return RowDrift(log_decay, angle)

    def noise_rows(self, memory: Tensor) -> Tensor:
        """Ones, [D]; zero in every second row for noise="real"."""
        ones = memory.new_ones(memory.shape[-2])
        return real_rows(ones[::2]) if self.noise == "real" else ones

    def refuse_key_size(self, D: int) -> str | None:
        """Rotations need rows in pairs."""
        return "an even D, since DampedRotation turns rows in pairs" if D % 2 else None


def real_rows(x: Tensor) -> Tensor:
    """Put keys or queries on the real rows of a damped rotation: (x₀, 0, x₁, 0, …).

    Args:
        x: [..., D/2].

    Returns:
        [..., D], with zeros in the imaginary rows, so that no write observes and no query reads them.

    Example:
        >>> real_rows(torch.tensor([1.0, 2.0]))
        tensor([1., 0., 2., 0.])
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).flatten(-2)
