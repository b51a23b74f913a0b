r"""Categories: a Dirichlet belief about the distribution of each slot, with prior, forgetting and exact evidence.

θ_i ~ Dirichlet(α₀, …, α₀)                                        before anything is written
p(θ_t) ∝ p(θ_{t-1})^δ_t p₀(θ)^(1−δ_t)                             forget:   ᾱ = δ_t α + (1 − δ_t) α₀
n_i | θ_i ~ Multinomial(θ_i),   n_ij = k_i v_j                    write:    α = ᾱ + k vᵀ
p(n | past) = Π_i DirichletMultinomial(n_i; ᾱ_i)
y_j = E Σ_i q_i θ_ij = Σ_i q_i α_ij / s_i,   s_i = Σ_j α_ij       read, with variance Σ_i q_i² p_ij (1 − p_ij)/(s_i + 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from membydesign.design.additive import AdditiveDesign, Sums, positive_fields
from membydesign.design.protocol import Assumptions
from membydesign.design.schema import Equation, StateSize

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from membydesign.state import Sizes


class Votes(NamedTuple):
    """What every slot has seen.

    Attributes:
        concentration: α, the votes of each slot for each category, prior included, [B,H,D,M].
    """

    concentration: Tensor


@dataclass(frozen=True)
class CategoricalMemory(AdditiveDesign):
    r"""Dirichlet–categorical votes: $\theta_i \sim \mathrm{Dirichlet}(\alpha_{i1}, \ldots, \alpha_{iM})$.

    $$\alpha_t = \delta_t \alpha_{t-1} + (1 - \delta_t)\alpha_0 + k_t v_t^\top, \qquad
    y_t = \sum_i q_i\, \alpha_i / s_i, \quad s_i = \sum_j \alpha_{ij}$$

    Row i of memory is a slot with a distribution $\theta_i$ over the M value columns. A write casts $k_i v_j \ge 0$
    votes for category j in slot i; v is usually a point of the simplex, one vote in all, and may be any weights. If q
    is on the simplex too, the read is a distribution over the columns. An unwritten slot is read as uniform.

    Forgetting is the geometric mean with the prior, $p(\theta_t) \propto p(\theta_{t-1})^{\delta_t} p_0(\theta)^{1 -
    \delta_t}$, so evidence fades and the belief returns to $\alpha_0$. Everything is conjugate, hence exact.

    The log evidence is that of the votes $n_{ij} = k_i v_j$ in each slot given how many there are, which is
    Dirichlet–multinomial. For one-hot keys and values that is $\log p(v_t \mid v_{<t}) = \log(\bar\alpha_{ij} /
    \bar s_i)$. Where votes are not whole numbers, Γ functions continue the density: it scores writes but is not
    normalised.

    A `MemoryLayer` takes keys, queries and values from a softmax.

    Args:
        concentration: α₀ > 0, the votes of every slot for every category before anything is written.

    Step parameters: `log_decay` log δ [B,T,H], at most 0.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16).softmax(-1).unbind()
        >>> out = filter_sequence(CategoricalMemory(), q, k, v, log_decay=-0.01)
        >>> bool(torch.allclose(out.output.sum(-1), torch.ones(1, 100, 2)))
        True
    """

    concentration: float = 1.0
    title = "Categorical memory (Dirichlet)"
    citation = "Kulhavý & Zarrop, Int. J. Control 1993 (forgetting); Gelman et al., Bayesian Data Analysis, §3.4"
    note = (
        "use it where values are symbols: a read at weights q that sum to one is a distribution over the M columns; "
        "keys, queries and values are at least 0"
    )

    def __post_init__(self) -> None:
        positive_fields(self, "concentration")

    def prior(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device | str | None) -> Votes:
        """Dirichlet(α₀, …, α₀) for every slot."""
        import torch

        return Votes(torch.full(sizes, self.concentration, dtype=dtype, device=device))

    def sums(self, state: Votes) -> Sums:
        """α, and its sum over columns."""
        return Sums(state.concentration, state.concentration.sum(-1))

    def state_of(self, sums: Sums) -> Votes:
        """Only α is kept."""
        return Votes(sums.table)

    def weight(self, v: Tensor) -> Tensor:
        """Σ_j v_j: a slot has seen as many votes as were cast in it."""
        return v.sum(-1)

    def resting(self, M: int) -> tuple[float, float]:
        """The prior."""
        return self.concentration, M * self.concentration

    def log_density(self, predicted: Sums, k: Tensor, v: Tensor) -> Tensor:
        """Dirichlet–multinomial, for every slot."""
        alpha, total = predicted
        votes = k[..., :, None] * v[..., None, :]
        cast = k * self.weight(v)[..., None]
        of_categories = ((alpha + votes).lgamma() - alpha.lgamma() - (votes + 1).lgamma()).sum(-1)
        return (of_categories + (cast + 1).lgamma() + total.lgamma() - (total + cast).lgamma()).sum(-1)

    def variance(self, sums: Sums, q: Tensor) -> Tensor:
        """Σ_i q_i² p_ij (1 − p_ij) / (s_i + 1)."""
        p = sums.table / sums.total[..., None]
        return ((q.square() / (sums.total + 1))[..., None] * p * (1 - p)).sum(-2)

    def layer_values(self, x: Tensor) -> Tensor:
        """One vote: a softmax over the columns."""
        import torch

        return x.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1).to(x.dtype)

    def state_size(self, D: int, M: int) -> StateSize:
        """Only α."""
        return StateSize(mean=D * M)

    def state_formula(self) -> str:
        """Only α."""
        return "D·M"

    def assumptions(self) -> Assumptions:
        """A Dirichlet belief about categories that fades to its prior."""
        return Assumptions("Discount", "Multinomial", "Dirichlet")

    def equations(self) -> tuple[tuple[str, tuple[Equation, ...]], ...]:
        """The Dirichlet–multinomial model, its update and its read."""
        return (
            (
                "memory drifts",
                (
                    Equation(
                        "p(θ_t) ∝ p(θ_{t-1})^δ_t p₀(θ)^(1 − δ_t)",
                        r"p(\theta_t) \propto p(\theta_{t-1})^{\delta_t}\, p_0(\theta)^{1 - \delta_t}",
                    ),
                ),
            ),
            (
                "a write observes",
                (
                    Equation(
                        "k_i v | θ_i ~ Multinomial(θ_i),  θ_i ~ Dirichlet(α_i)",
                        r"k_i \mathbf{v} \mid \theta_i \sim \mathrm{Multinomial}(\theta_i),\quad "
                        r"\theta_i \sim \mathrm{Dirichlet}(\alpha_i)",
                    ),
                ),
            ),
            (
                "predict",
                (
                    Equation(
                        "ᾱ = δ_t α_{t-1} + (1 − δ_t) α₀",
                        r"\bar\alpha = \delta_t \alpha_{t-1} + (1 - \delta_t)\, \alpha_0",
                    ),
                ),
            ),
            ("write", (Equation("α_t = ᾱ + k_t v_tᵀ", r"\alpha_t = \bar\alpha + \mathbf{k}_t \mathbf{v}_t^\top"),)),
            (
                "read",
                (
                    Equation(
                        "y_t = Σ_i q_i α_i / s_i,  s_i = Σ_j α_ij",
                        r"\mathbf{y}_t = \sum_i q_i\, \alpha_i / s_i,\quad s_i = \sum_j \alpha_{ij}",
                    ),
                ),
            ),
        )
