r"""How memory drifts between two writes: $S_t \mid S_{t-1} \sim \mathcal N(A_t S_{t-1},\ Q_t)$.

The classes below are the forms of $A_t$ in the paper, and RWKV-7's. A transition of your own derives from `Transition`
and says which parameters it needs at a step, what $A_t x$ is, and its equation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor

from membydesign.design.row_drift import Removal, RowDrift, RowNoise
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sources import Learned, Source, Spectrum
from membydesign.products import product

if TYPE_CHECKING:
    from collections.abc import Mapping

PROCESS_NOISE = StepParameter("process_noise", "ℓ_t²", bound=">= 0")
FREE_NOISE = Equation("ℓ_t² N", r"\ell_t^2 \mathbf{N}")
"""Process noise in the equations of designs."""


class Transition(ABC):
    r"""The drift of memory, $S_t \mid S_{t-1} \sim \mathcal N(A_t S_{t-1},\ Q_t)$, with $A_t$ and $Q_t$ of size D×D.

    By default $Q_t = \ell_t^2 N$, where $N$ is a diagonal of ones (and zeros, for rows that never receive noise).

    Attributes:
        step_parameters: the parameters of A_t.
        noise_parameters: the parameters of Q_t, which only designs with process noise have.
        parameter_sources: where a layer takes them from; others follow their bounds.
        multiplications_per_entry: multiplications of A_t x for each entry of x.
    """

    step_parameters: ClassVar[tuple[StepParameter, ...]] = ()
    noise_parameters: ClassVar[tuple[StepParameter, ...]] = (PROCESS_NOISE,)
    parameter_sources: ClassVar[Mapping[str, Source]] = {"process_noise": Learned(0.05)}
    multiplications_per_entry: ClassVar[int] = 1

    @property
    @abstractmethod
    def matrix(self) -> Equation:
        """The equation of A_t."""

    @abstractmethod
    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        r"""$A_t x$, along the axis of D.

        Args:
            x: [..., D, n].
            step: this step's parameters by name, [...] with the axes that `step_parameters` declares.

        Returns:
            [..., D, n].
        """

    @property
    def process_noise_shape(self) -> Equation | None:
        """The equation of N, the rows that process noise reaches; None if its law has no N."""
        return Equation("I", r"\mathbf{I}")

    @property
    def noise_law(self) -> Equation:
        """Q_t in the equations of a design."""
        return FREE_NOISE

    @property
    def label(self) -> str:
        """What tables call it: by default its class."""
        return type(self).__name__

    def noise_rows(self, x: Tensor) -> Tensor | None:
        """The diagonal of N for a memory x, [..., D, n]: [D], in the type of x; None if it is all ones."""
        del x
        return None

    def noise_covariance(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """Q_t, [B,H,D,D], for a memory x, [B,H,D,n]."""
        rows = self.noise_rows(x)
        variances = step["process_noise"][..., None] * (x.new_ones(x.shape[-2]) if rows is None else rows)
        return torch.diag_embed(variances)

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift | None:
        r"""The same drift as a decay of each row and a turn of each pair of rows, if it has that form.

        The chunked kernels need it: they work with decays accumulated over many steps. None (the default) means that
        $A_t$ has another form, and the loop over tokens runs it.

        Args:
            parameters: of a whole sequence, [B,T,H] with the axes that `step_parameters` declares.
            k: keys, [B,T,H,D].
        """
        del parameters, k
        return None

    def row_noise(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowNoise | None:
        """Q_t as independent noise of rows, if it has that form; arguments as for `row_drift`."""
        if type(self).noise_covariance is not Transition.noise_covariance:
            return None
        rows = self.noise_rows(k.mT)
        return RowNoise(parameters["process_noise"], k.new_ones(1) if rows is None else rows)

    def refuse_key_size(self, D: int) -> str | None:
        """What D must be, if this transition cannot act on D rows ("an even D, since …"); None if it can."""
        del D
        return None

    def refuse_without_noise(self) -> str | None:
        """Why this transition has no meaning in a design without process noise; None if it has."""
        return None

    def with_drift(self, drift: Transition) -> Transition:
        """Another drift, with the kind of process noise that this one has."""
        return drift

    def layer_key_size(self, D: int) -> int:
        """How many entries of each key and query a layer maps from its input."""
        return D

    def layer_keys(self, x: Tensor) -> Tensor:
        """Place what a layer mapped from its input on the D rows of memory."""
        return x

    def layer_parameters(self, parameters: Mapping[str, Tensor | float]) -> Mapping[str, Tensor | float]:
        """Bring step parameters that a layer mapped from its input into a form that keeps memory stable."""
        return parameters


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

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """X itself, [..., D, n]."""
        del step
        return x

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift:
        """No decay: zeros, [B,T,H,1]."""
        del parameters
        return RowDrift(k.new_zeros(*k.shape[:-1], 1))


@final
@dataclass(frozen=True)
class ScalarDecay(Transition):
    r"""All of memory fades at one rate: $A_t = a_t I$ with $a_t = e^{\texttt{log\_decay}_t} \in (0, 1]$.

    Step parameters: `log_decay` [B,T,H], at most 0.
    """

    step_parameters = (StepParameter("log_decay", "log a_t", bound="<= 0"),)
    parameter_sources = {**Transition.parameter_sources, "log_decay": Spectrum("log_decay")}

    @property
    def matrix(self) -> Equation:
        """A_t = a_t I."""
        return Equation("A_t = a_t I", r"\mathbf{A}_t = a_t \mathbf{I}")

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """a_t x, with log_decay [...]; x [..., D, n]."""
        return step["log_decay"].exp()[..., None, None] * x

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift:
        """One decay for all rows, [B,T,H,1]."""
        del k
        return RowDrift(parameters["log_decay"][..., None])


@final
@dataclass(frozen=True)
class DiagonalDecay(Transition):
    r"""Every key dimension fades at its own rate: $A_t = \mathrm{diag}(\alpha_t)$, $\alpha_t \in (0, 1]^D$.

    Step parameters: `log_decay` [B,T,H,D], at most 0.
    """

    step_parameters = (StepParameter("log_decay", "log α_t", axes=("D",), bound="<= 0"),)
    parameter_sources = {**Transition.parameter_sources, "log_decay": Spectrum("log_decay")}

    @property
    def matrix(self) -> Equation:
        """A_t = diag(α_t)."""
        return Equation("A_t = diag(α_t)", r"\mathbf{A}_t = \mathrm{diag}(\boldsymbol{\alpha}_t)")

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """α_t ⊙ x, with log_decay [..., D]; x [..., D, n]."""
        return step["log_decay"].exp()[..., None] * x

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift:
        """A decay of each row, [B,T,H,D]."""
        del k
        return RowDrift(parameters["log_decay"])


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
        StepParameter("log_decay", "log ρ_t", axes=("D/2",), bound="<= 0"),
        StepParameter("angle", "θ_t", axes=("D/2",)),
    )
    parameter_sources = {
        **Transition.parameter_sources,
        "log_decay": Spectrum("log_decay", "angle"),
        "angle": Spectrum("log_decay", "angle"),
    }
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

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """Each pair of rows turned by θ and scaled by ρ; log_decay and angle [..., D/2], x [..., D, n]."""
        radius, angle = step["log_decay"].exp(), step["angle"]
        cos, sin = (radius * angle.cos())[..., None], (radius * angle.sin())[..., None]
        real, imaginary = x[..., 0::2, :], x[..., 1::2, :]
        turned = torch.stack((cos * real - sin * imaginary, sin * real + cos * imaginary), dim=-2)
        return turned.flatten(-3, -2)

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift:
        """The radius and the angle of each pair, [B,T,H,D/2]."""
        del k
        return RowDrift(parameters["log_decay"], parameters["angle"])

    def noise_rows(self, x: Tensor) -> Tensor | None:
        """None, or zero in every second row for noise="real"."""
        return real_rows(x.new_ones(x.shape[-2] // 2)) if self.noise == "real" else None

    def refuse_key_size(self, D: int) -> str | None:
        """Rotations need rows in pairs."""
        return "an even D, since DampedRotation turns rows in pairs" if D % 2 else None

    def refuse_without_noise(self) -> str | None:
        """Without process noise there is nothing to keep out of the imaginary rows."""
        if self.noise == "all":
            return None
        return (
            'DampedRotation(noise="real") says which rows process noise enters, but this design has no process noise; '
            "use DampedRotation()"
        )

    def layer_key_size(self, D: int) -> int:
        """Half of the rows for noise="real": a layer writes and reads the real ones."""
        return D // 2 if self.noise == "real" else D

    def layer_keys(self, x: Tensor) -> Tensor:
        """On the real rows for noise="real"."""
        return real_rows(x) if self.noise == "real" else x


@final
@dataclass(frozen=True)
class DecayAndRemoval(Transition):
    r"""Rows fade, and memory loses what it holds at one key: $A_t = \mathrm{diag}(w_t) - b_t \kappa_t^\top$ (RWKV-7).

    Step parameters: `log_decay` log w [B,T,H,D], at most 0; `removal_key` κ [B,T,H,D], what is read to be removed;
    `removal` b [B,T,H,D], where it is removed.
    """

    step_parameters = (
        StepParameter("log_decay", "log w_t", axes=("D",), bound="<= 0"),
        StepParameter("removal_key", "κ_t", axes=("D",)),
        StepParameter("removal", "b_t", axes=("D",)),
    )
    parameter_sources = {**Transition.parameter_sources, "log_decay": Spectrum("log_decay")}
    multiplications_per_entry = 3

    @property
    def matrix(self) -> Equation:
        """A_t = diag(w_t) − b_t κ_tᵀ."""
        return Equation(
            "A_t = diag(w_t) − b_t κ_tᵀ",
            r"\mathbf{A}_t = \mathrm{diag}(\mathbf{w}_t) - \mathbf{b}_t \boldsymbol{\kappa}_t^\top",
        )

    def apply(self, x: Tensor, step: Mapping[str, Tensor]) -> Tensor:
        """w_t ⊙ x − b_t (κ_tᵀ x), with parameters [..., D]; x [..., D, n]."""
        removed = step["removal"][..., None] * product(step["removal_key"][..., None, :], x)
        return step["log_decay"].exp()[..., None] * x - removed

    def row_drift(self, parameters: Mapping[str, Tensor], k: Tensor) -> RowDrift:
        """A decay of each row, and what is removed besides."""
        del k
        removal = Removal(parameters["removal_key"], parameters["removal"])
        return RowDrift(parameters["log_decay"], removal=removal)

    def layer_parameters(self, parameters: Mapping[str, Tensor | float]) -> Mapping[str, Tensor | float]:
        """Bring κ to length one, and b to a ⊙ κ with rates a = σ(b): as RWKV-7 has them, for mapped κ and b."""
        key, removal = parameters["removal_key"], parameters["removal"]
        if isinstance(key, (int, float)) or isinstance(removal, (int, float)):  # numbers that a user fixed
            return parameters
        key = torch.nn.functional.normalize(key, dim=-1)
        return {**parameters, "removal_key": key, "removal": removal.sigmoid() * key}


def real_rows(x: Tensor) -> Tensor:
    """Put keys or queries on the real rows of a damped rotation: (x₀, 0, x₁, 0, …).

    Args:
        x: [..., D/2].

    Returns:
        [..., D], with zeros in the imaginary rows, so that no write observes and no query reads them.

    Examples:
        >>> real_rows(torch.tensor([1.0, 2.0]))
        tensor([1., 0., 2., 0.])
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).flatten(-2)
