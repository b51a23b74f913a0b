r"""The low-rank covariance: what writes have resolved is kept along R directions, all others have the prior's variance.

Memory relaxes to its prior, $Q_t = \sigma^2(I - A_t A_t^\top)$, so that $P = \sigma^2(I - W^\top W)$ keeps its form: a
drift maps the rows of W, and a write appends one. When all R rows are taken, R + 1 become R again: they are turned
among each other (which leaves $W^\top W$ as it is) until one of them is short, and that one is dropped. So P can only
grow, whatever is dropped: the filter is never overconfident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from membydesign.belief import LowRankBelief, Resolved
from membydesign.design.covariance import Covariance, check_prior, check_whole_number, times_groups
from membydesign.design.protocol import Flaw
from membydesign.design.schema import Equation
from membydesign.errors import NotPositiveDefiniteError
from membydesign.products import product

if TYPE_CHECKING:
    from torch import Tensor

    from membydesign.design.protocol import Step
    from membydesign.design.sequence_drift import Drift, Gains, SequenceDrift
    from membydesign.design.write import WriteEvent
    from membydesign.state import Sizes


@final
@dataclass(frozen=True)
class LowRank(Covariance):
    r"""The prior's covariance, except along R directions that writes have resolved.

    $$\bar P_t = A_t P_{t-1} A_t^\top + \sigma^2(I - A_t A_t^\top), \qquad P_t = \sigma^2 (I - W_t^\top W_t), \qquad
    W_t = \mathrm{shortened}\begin{pmatrix} W_{t-1} A_t^\top \\ \sqrt{\beta_t}\, u_t^\top / \sigma \end{pmatrix}$$

    A memory of its own process noise: it relaxes to $\mathcal N(0, \sigma^2 I)$. Exact while at most R directions were
    written, and for R ≥ D; otherwise P is at least the exact covariance. The drift must not expand memory,
    $A_t A_t^\top \preceq I$, as decays and damped rotations do not.

    Args:
        rank: R, the directions that are kept.
        prior: $\sigma^2$, the variance of every direction before anything is written, and long after.

    Step parameters: none of its own; no process noise.
    State: G·(R·D + 1) elements: W [B,H,G,R,D], σ² [B,H,G].
    """

    rank: int = 16
    prior: float = 1.0
    predicts: ClassVar[bool] = False  # the noise of the drift is its own, not the transition's
    belief = LowRankBelief

    def __post_init__(self) -> None:
        check_whole_number("LowRank", "rank", self.rank)
        check_prior("LowRank", self.prior)
        if self.prior == 0:
            raise ValueError(f"LowRank(prior): expected a variance above 0, got {self.prior!r}")

    @property
    def exactness(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which truncation, and what it does not do."""
        return f"rank-{self.rank} truncation, never overconfident"

    @property
    def equations(self) -> tuple[Equation, ...]:
        """P̄ = A P Aᵀ + σ²(I − AAᵀ), P = σ²(I − WᵀW)."""
        return (
            Equation(
                "P̄_t = A_t P_{t-1} A_tᵀ + σ² (I − A_t A_tᵀ)",
                r"\bar{\mathbf{P}}_t = \mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top "
                r"+ \sigma^2 (\mathbf{I} - \mathbf{A}_t \mathbf{A}_t^\top)",
            ),
            Equation(
                f"P_t = σ² (I − W_tᵀ W_t),  W_t = the rows W_{{t-1}} A_tᵀ and √β_t u_tᵀ/σ, shortened to {self.rank}",
                r"\mathbf{P}_t = \sigma^2 (\mathbf{I} - \mathbf{W}_t^\top \mathbf{W}_t),\quad \mathbf{W}_t = "
                rf"\mathrm{{shortened}}_{{{self.rank}}}"
                r"(\mathbf{W}_{t-1} \mathbf{A}_t^\top;\ \sqrt{\beta_t}\, \mathbf{u}_t^\top / \sigma)",
            ),
        )

    def initial(self, sizes: Sizes, groups: int, *, dtype: torch.dtype, device: torch.device | str | None) -> Resolved:
        """No row, and σ²."""
        shape = (sizes.batch, sizes.heads, groups)
        return Resolved(
            torch.zeros(*shape, self.rank, sizes.D, dtype=dtype, device=device),
            torch.full(shape, self.prior, dtype=dtype, device=device),
        )

    def predict(self, kept: Resolved, drifted: Drift, step: Step) -> Resolved:
        """W Aᵀ: A σ²(I − WᵀW) Aᵀ + σ²(I − AAᵀ) = σ²(I − A WᵀW Aᵀ)."""
        del step
        return Resolved(drifted.apply(kept.rows.mT).mT, kept.prior)

    def times(self, predicted: Resolved, k: Tensor) -> Tensor:
        """P̄ k = σ²(k − Wᵀ(W k))."""
        k = k[:, :, None, None]
        along = product(k, predicted.rows.mT)
        return predicted.prior[..., None] * (k - product(along, predicted.rows))[..., 0, :]

    def condition(self, predicted: Resolved, event: WriteEvent, k: Tensor) -> Resolved:
        """One row more, √β u/σ, and then no more than R."""
        del k
        added = (event.precision / predicted.prior).sqrt()[..., None] * event.warped_key
        return Resolved(shortened(predicted.rows, added), predicted.prior)

    def variance(self, kept: Resolved, q: Tensor, noise: Tensor | None, step: Step) -> Tensor:
        """σ²(‖q‖² − ‖Wq‖²), or zero where rounding makes it negative."""
        del noise, step
        return kept.quadratic(q)

    def gains(self, kept: Resolved, k: Tensor, drift: SequenceDrift, q: Tensor | None) -> Gains:
        """Token by token, each in O(R²·D)."""
        return self.gains_by_token(kept, k, drift, q)

    def flaws(self, kept: Resolved, *, thorough: bool) -> list[Flaw]:
        """A prior that is no variance, or rows that resolve more than there is, beyond what rounding explains."""
        rows, prior = kept
        rounding = 8 * max(rows.shape[-1], 8) * torch.finfo(rows.dtype).eps
        excess = rows.square().sum(-1).amax(-1) - 1
        expected = "rows W with W Wᵀ ⪯ I"
        if thorough:
            identity = (1 + rounding) * torch.eye(rows.shape[-2], dtype=rows.dtype, device=rows.device)
            lost = torch.linalg.cholesky_ex(identity - product(rows, rows.mT)).info != 0
        else:
            lost = excess > rounding
        return [
            Flaw("covariance.prior", "variances above 0", prior <= 0, lambda _: f"{prior.min().item():.3g}"),
            Flaw(
                "covariance.rows",
                expected,
                lost,
                lambda _: f"a row of squared length {1 + excess.max().item():.6g}, or rows that exceed it together",
                NotPositiveDefiniteError,
            ),
        ]

    def with_prior(self, prior: float) -> LowRank:
        """The same rank with another prior."""
        return LowRank(self.rank, prior)

    def elements(self, D: int, groups: int) -> int:
        """G·(R·D + 1)."""
        return groups * (self.rank * D + 1)

    def formula(self, groups: int) -> str:
        """R·D + 1 for each group."""
        return times_groups(groups, f"{self.rank}·D + 1" if groups == 1 else f"({self.rank}·D + 1)")

    def cost(self, D: int, groups: int, drift: int) -> tuple[str, int]:
        """The drift, the warped key and the turn of R rows; half a Gram matrix of R + 1."""
        n = self.rank + 1
        return f"{self.rank}²·G·D", groups * (self.rank * D * (drift + 4) + D * n * (n + 1) // 2 + n**3 // 2)


def shortened(rows: Tensor, added: Tensor) -> Tensor:
    r"""R rows that hold almost as much of $W^\top W + w w^\top$ as R rows can.

    A row of zeros is free, and the first one takes w. Otherwise let F be the R + 1 rows, and i the row that the others
    explain best: $\sum_j x_j F_j$, in least squares, is nearest to it. With $q = (e_i - x)/\lVert e_i - x \rVert$, a
    reflection turns the short row $q^\top F$ into the last, which is dropped. With $q_{R+1} \le 0$ the others become

    $$W_j + q_j\, \frac{w - F^\top q}{1 - q_{R+1}}$$

    If the rows are linearly dependent, $q^\top F = 0$ and nothing is lost. Otherwise q is one step of inverse iteration
    away from the smallest singular direction. Its derivative, unlike that of a singular direction, stays bounded where
    singular values meet.

    Args:
        rows: W, [...,R,D].
        added: w, [...,D].

    Returns:
        [...,R,D].
    """
    every = torch.cat([rows, added[..., None, :]], -2)
    gram = product(every, every.mT)
    n = gram.shape[-1]
    lengths = gram.diagonal(dim1=-2, dim2=-1)
    total = lengths.sum(-1, keepdim=True)
    free = lengths[..., :-1] == 0
    has_room = free.any(-1, keepdim=True)
    settled = has_room | (added == 0).all(-1, keepdim=True)  # nothing needs to be dropped, or w itself
    identity = torch.eye(n, dtype=rows.dtype, device=rows.device)
    gram = torch.where(settled[..., None], identity, gram / torch.where(settled, 1.0, total)[..., None])
    # what rounding may have made of a singular matrix becomes positive definite
    regular = gram + 4 * n * torch.finfo(rows.dtype).eps * identity
    # the squared distance of row i from the span of the others is 1/(G^{-1})_ii
    nearest = torch.cholesky_inverse(torch.linalg.cholesky_ex(regular.detach()).L).diagonal(dim1=-2, dim2=-1).argmax(-1)
    chosen = _unit(nearest, n, rows)
    others = 1 - chosen
    system = regular * others[..., :, None] * others[..., None, :] + torch.diag_embed(chosen)
    target = others * torch.take_along_dim(gram, nearest[..., None, None], -1)[..., 0]
    explained = torch.cholesky_solve(target[..., None], torch.linalg.cholesky_ex(system).L)[..., 0]
    q = chosen - explained
    q = q / q.square().sum(-1, keepdim=True).sqrt()
    q = torch.where(q[..., -1:] > 0, -q, q)
    place = _unit(free.to(torch.int8).argmax(-1), n, rows)
    place = torch.where(has_room, place, 0.0)
    q = torch.where(settled, place, q)
    dropped = torch.where(settled, 0.0, product(q[..., None, :], every)[..., 0, :])
    change = (added - dropped) / (1 - q[..., -1:])
    rows = torch.where(place[..., :-1, None] > 0, 0.0, rows)  # w takes its place: nothing is added to a free row
    return rows + q[..., :-1, None] * change[..., None, :]


def _unit(index: Tensor, n: int, like: Tensor) -> Tensor:
    """The unit vectors of indices [...], [...,n]; torch's own one_hot reads its input, so it cannot be mapped."""
    return (index[..., None] == torch.arange(n, device=like.device)).to(like.dtype)
