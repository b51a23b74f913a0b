r"""A write that distrusts outliers: Student-t noise in the place of Gaussian noise.

The memory is the Bayesian Layer's. Only what a write observes changes: with $s = r^2 + k^\top \bar P k$, the variance
that the filter expects of the error $e = v - \bar M^\top k$,

    v_t | S_t, τ ~ N(S_tᵀ k_t, (r_t²/τ) I),   τ ~ Gamma(ν/2, ν/2)     heavy tails: now and then τ is small
    effective noise   r_t² (ν + e²/s) / (ν + 1)                       what the filter conditions with

where e² is the mean square of the error over the columns of a noise group. A write as surprising as expected (e² = s)
keeps its noise; one that is ten standard deviations off is trusted (ν + 100)/(ν + 1) times less. The posterior of a
Student-t likelihood is not Gaussian; replacing it by a Gaussian after each write makes this an assumed density filter.

The log density of a write is that of a multivariate Student-t with ν degrees of freedom and scale s for each group:
the marginal of N(0, (s/τ) I), in which one τ scales the whole expected variance. Its tails therefore are those of the
likelihood, and ν → ∞ gives the Gaussian filter and its evidence.

The library has this write too, as `membydesign.StudentTWrite`; here it is what you would write yourself.

You write `observe`, which turns the predictive mean and variance at the key into an effective observation, the names of
its parameters, and its equations. Decoding, packing, layers, models, saving and the contract test come for free. The
effective noise depends on values, so `Write.noise` stays undefined and the loop over tokens filters this design.

    design = DesignModel(DiagonalDecay(), StudentTWrite(nu=4), Dense())
    layer = MemoryLayer(design, hidden_size=64, num_heads=2, head_dim=32)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from membydesign import Equation, Learned, Observation, StepParameter, Write

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign import Step


@dataclass(frozen=True)
class StudentTWrite(Write):
    r"""A robust write, $v_t \mid S_t \sim t_\nu(S_t^\top k_t,\ r_t^2 I)$, by its effective Gaussian noise.

    Args:
        nu: ν > 0, degrees of freedom: small for heavy tails, large for a Gaussian.
        groups: G, how many groups of value columns have a noise, and outliers, of their own.

    Step parameters: `write_noise` $r_t^2$ > 0, [B,T,H] or [B,T,H,G].
    """

    nu: float = 4.0
    groups: int = 1
    exactness = "assumed density"
    step_parameters = (StepParameter("write_noise", "r_t²", axes=("G",), optional_axes=True, bound="> 0"),)
    parameter_sources = {"write_noise": Learned(0.5)}

    def __post_init__(self) -> None:
        if not (math.isfinite(self.nu) and self.nu > 0):
            raise ValueError(f"StudentTWrite(nu): expected a finite number above 0, got {self.nu!r}")
        if type(self.groups) is not int or self.groups < 1:
            raise ValueError(f"StudentTWrite(groups): expected a whole number of at least 1, got {self.groups!r}")

    def observe(self, mean: Tensor, variance: Tensor, v: Tensor, step: Step) -> Observation:
        """The value itself, with more noise the more surprising it is; mean and v [B,H,M], variance [B,H,G]."""
        noise, nu = step["write_noise"], self.nu
        expected = noise + variance  # s
        squares = (v - mean).unflatten(-1, (self.groups, -1)).square()  # [B,H,G,M/G]
        effective = noise * (nu + squares.mean(-1) / expected) / (nu + 1)
        return Observation(v, effective, self._log_density(squares.sum(-1), expected, squares.shape[-1]))

    def _log_density(self, squares: Tensor, scale: Tensor, columns: int) -> Tensor:
        """The log density of a multivariate Student-t for each group of columns, summed over groups: [B,H]."""
        nu = self.nu
        constant = math.lgamma((nu + columns) / 2) - math.lgamma(nu / 2) - columns / 2 * math.log(math.pi * nu)
        tail = (nu + columns) / 2 * (squares / (nu * scale)).log1p()
        return (constant - columns / 2 * scale.log() - tail).sum(-1)

    def with_groups(self, groups: int) -> StudentTWrite:
        """The same write with another number of groups."""
        return StudentTWrite(self.nu, groups)

    @property
    def density(self) -> tuple[Equation, ...]:
        """v_t | S_t ~ t_ν(S_tᵀ k_t, r_t² I)."""
        return (
            Equation(
                f"v_t | S_t ~ Student-t with ν = {self.nu:g}, location S_tᵀ k_t, scale r_t² I",
                rf"\mathbf{{v}}_t \mid \mathbf{{S}}_t \sim t_{{{self.nu:g}}}"
                r"(\mathbf{S}_t^\top \mathbf{k}_t,\ r_t^2 \mathbf{I})",
            ),
        )

    @property
    def update(self) -> tuple[Equation, ...]:
        """The noise grows with the error; the rest is the Kalman update."""
        return (
            Equation("u_t = P̄_t k_t", r"\mathbf{u}_t = \bar{\mathbf{P}}_t \mathbf{k}_t"),
            Equation(
                "r̃_t² = r_t² (ν + e_t²/s_t) / (ν + 1),  s_t = r_t² + k_tᵀ u_t,  e_t² = mean (v_t − M̄_tᵀ k_t)²",
                r"\tilde r_t^2 = r_t^2 \frac{\nu + e_t^2 / s_t}{\nu + 1},\quad"
                r" s_t = r_t^2 + \mathbf{k}_t^\top \mathbf{u}_t",
            ),
            Equation("β_t = 1 / (r̃_t² + k_tᵀ u_t)", r"\beta_t = (\tilde r_t^2 + \mathbf{k}_t^\top \mathbf{u}_t)^{-1}"),
            Equation(
                "M_t = M̄_t + β_t u_t (v_t − M̄_tᵀ k_t)ᵀ",
                r"\mathbf{M}_t = \bar{\mathbf{M}}_t + \beta_t \mathbf{u}_t"
                r" (\mathbf{v}_t - \bar{\mathbf{M}}_t^\top \mathbf{k}_t)^\top",
            ),
        )
