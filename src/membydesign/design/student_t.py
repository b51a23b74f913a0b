r"""Writes that distrust outliers: Student-t noise in the place of Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from membydesign.belief import innovation_squares, student_t_log_density
from membydesign.design.schema import Equation, StepParameter
from membydesign.design.sources import Learned
from membydesign.design.write import Observation, ObserveMemory, Write

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design.protocol import Step


@final
@dataclass(frozen=True)
class StudentTWrite(Write):
    r"""A write with heavy tails, $v_t \mid S_t \sim t_\nu(S_t^\top k_t,\ r_t^2 I)$, by its effective Gaussian noise.

    A Student-t is a Gaussian whose variance is uncertain: $r_t^2/\tau_t$ with $\tau_t \sim
    \mathrm{Gamma}(\nu/2, \nu/2)$ for each write. The filter conditions with the noise

    $$\tilde r_t^2 = r_t^2\,\frac{\nu + e_t^2/s_t}{\nu + 1},\qquad s_t = r_t^2 + k_t^\top \bar P_t k_t,$$

    where $e_t^2$ is the mean square of the error $v_t - \bar M_t^\top k_t$ over the columns of a noise group. A write
    as surprising as expected ($e^2 = s$) keeps its noise; one that is ten standard deviations off is trusted
    $(\nu + 100)/(\nu + 1)$ times less. ν → ∞ gives `ObserveMemory`.

    Three things are approximated, hence "assumed density". The posterior under a Student-t is replaced by a Gaussian
    after each write. The variance of that Gaussian takes $\tau_t$ as known, at about its posterior mean given the
    error. The log density of a write is that of a multivariate Student-t with ν degrees of freedom and scale $s_t$, in
    which $\tau_t$ scales the uncertainty of memory as well as the noise.

    The noise depends on values, so the loop over tokens runs designs with this write.

    Args:
        degrees: ν > 0, the degrees of freedom: small for heavy tails, large for almost a Gaussian.
        groups: G, how many groups of value columns have a noise, and outliers, of their own.

    Step parameters: `write_noise` $r_t^2$ > 0, [B,T,H] or [B,T,H,G].
    """

    degrees: float = 4.0
    groups: int = 1
    exactness = "assumed density"
    step_parameters = (StepParameter("write_noise", "r_t²", axes=("G",), optional_axes=True, bound="> 0"),)
    parameter_sources = {"write_noise": Learned(0.5)}

    def __post_init__(self) -> None:
        number = isinstance(self.degrees, (int, float)) and not isinstance(self.degrees, bool)
        if not number or not (math.isfinite(self.degrees) and self.degrees > 0):
            raise ValueError(f"StudentTWrite(degrees): expected a finite number above 0, got {self.degrees!r}")
        if not isinstance(self.groups, int) or isinstance(self.groups, bool) or self.groups < 1:
            raise ValueError(f"StudentTWrite(groups): expected a whole number of at least 1, got {self.groups!r}")

    def observe(self, mean: Tensor, variance: Tensor, v: Tensor, step: Step) -> Observation:
        """The value itself, with more noise the more surprising it is."""
        noise, columns = step["write_noise"], v.shape[-1] // self.groups
        precision = 1 / (noise + variance)  # 1/s
        squares = innovation_squares(v - mean, precision)
        effective = noise * (self.degrees + squares / columns) / (self.degrees + 1)
        half = precision.new_full((), self.degrees / 2)
        return Observation(v, effective, student_t_log_density(squares, precision, half, half, columns))

    def with_groups(self, groups: int) -> StudentTWrite:
        """The same write with another number of noise groups."""
        return StudentTWrite(self.degrees, groups)

    @property
    def density(self) -> tuple[Equation, ...]:
        """v_t | S_t ~ t_ν(S_tᵀ k_t, r_t² I)."""
        return (
            Equation(
                f"v_t | S_t ~ Student-t with ν = {self.degrees:g}, location S_tᵀ k_t, scale r_t² I",
                rf"\mathbf{{v}}_t \mid \mathbf{{S}}_t \sim t_{{\nu}}(\mathbf{{S}}_t^\top \mathbf{{k}}_t,\ "
                rf"r_t^2 \mathbf{{I}}),\quad \nu = {self.degrees:g}",
            ),
        )

    @property
    def update(self) -> tuple[Equation, ...]:
        """The noise grows with the error; the rest is the update of `ObserveMemory`."""
        warped_key, _, mean = ObserveMemory().update
        return (
            warped_key,
            Equation(
                "r̃_t² = r_t² (ν + e_t²/s_t) / (ν + 1),  s_t = r_t² + k_tᵀ u_t,  e_t² = mean (v_t − M̄_tᵀ k_t)²",
                r"\tilde r_t^2 = r_t^2\,\frac{\nu + e_t^2 / s_t}{\nu + 1},\quad"
                r" s_t = r_t^2 + \mathbf{k}_t^\top \mathbf{u}_t,\quad"
                r" e_t^2 = \tfrac{1}{M} \lVert \mathbf{v}_t - \bar{\mathbf{M}}_t^\top \mathbf{k}_t \rVert^2",
            ),
            Equation(
                "β_t = 1 / (r̃_t² + k_tᵀ u_t)",
                r"\beta_t = (\tilde r_t^2 + \mathbf{k}_t^\top \mathbf{u}_t)^{-1}",
            ),
            mean,
        )
