r"""How a belief passes a stretch of tokens, whatever it was at the start: maps of constant size.

A process that holds tokens from the middle of a sequence does not know the belief that they start from. For many
designs it can still say what they will do to it. The maps below come out of the filter itself, run on probes, so that
they hold for any transition, also one of your own:

    covariance   P ↦ C + ρ F (γ I + P J)⁻¹ P Fᵀ          from a run with P₀ = 0, M₀ = I, and no values
    mean         M ↦ F M + B                             from a run with M₀ = [0 | I], once P₀ is known
    sums         s ↦ f s + b                             from a run that starts at the prior

In the first, C and F are the covariance and the mean at the end. J is the information about the memory at the start:
with P₀ = 0 the errors e_t of the probe are independent, so $J = \sum_t \beta_t e_t e_t^\top$ (Särkkä &
García-Fernández, IEEE Transactions on Automatic Control 2021, restricted to covariances). ρ and γ are 1, except for
covariances that forget.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from membydesign.products import product
from membydesign.state import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from membydesign.design.protocol import State

Element = tuple[Tensor, ...]
"""What a map is made of: float64 tensors whose first axes are [B,H]."""

Probe = Any
"""Runs a filter: `run(design, x, initial)` returns its output, state and precision, as `filter.inputs.Run` has them."""


class Passage(ABC):
    """How one part of a belief passes a stretch of tokens.

    `Design.passages` lists those of all parts, in the order in which they can be known: each may need the parts before
    it, as the map of the mean needs the covariance.
    """

    @abstractmethod
    def element(self, design: Any, x: Any, start: State, run: Probe) -> Element:
        """The map of a stretch.

        Args:
            design: the assumptions.
            x: q, k, v and step parameters of the tokens, as `filter.inputs.Inputs`.
            start: the belief before the first of them, in which only the parts of earlier passages are known.
            run: filters.
        """

    @abstractmethod
    def shapes(self, design: Any, state: State) -> tuple[tuple[int, ...], ...]:
        """The shapes of an element's tensors, for states of the form of `state`."""

    @abstractmethod
    def passed(self, design: Any, element: Element, state: State) -> State:
        """The state, in float64, with this part of it after a stretch whose element is given."""


class CovarianceMap(Passage):
    r"""$P \mapsto C + \rho F(\gamma I + PJ)^{-1}PF^\top$, for a whole covariance of each noise group.

    Args:
        scale: by how much each token scales the covariance besides its drift, [B,T,H], from step parameters: 1/δ of
            `Discounted`. None if memory and covariance drift alike.
        observed: whether writes observe memory; additive writes tell nothing about what it held.
    """

    def __init__(self, scale: Callable[[Mapping[str, Tensor]], Tensor] | None = None, *, observed: bool = True) -> None:
        self.scale, self.observed = scale, observed

    def element(self, design: Any, x: Any, start: State, run: Probe) -> Element:
        """A run in float64 from P₀ = 0 and M₀ = I whose values are zero, read at the keys."""
        x = x.map(lambda t: t.double())
        D, G = x.k.shape[-1], start.covariance.shape[2]
        values = x.v.new_zeros(*x.v.shape[:-1], G * D)
        identity = torch.eye(D, dtype=x.k.dtype, device=x.k.device)
        mean = identity.repeat(1, G).expand(*start.mean.shape[:2], D, G * D)
        initial = type(start)(mean, torch.zeros_like(start.covariance, dtype=x.k.dtype))
        out = run(design, x._replace(q=x.k, v=values), initial)
        F, C = out.state.mean.unflatten(-1, (G, D)).movedim(-2, 2), out.state.covariance
        weights, fading, growth = _scales(None if self.scale is None else self.scale(x.parameters), x.k)
        J = torch.zeros_like(C)
        if self.observed:
            # what is left of an error after its own write is r²β of it
            left = design.write.noise(x.parameters) * out.precision
            error = (out.output.unflatten(-1, (G, D)) / left[..., None]).movedim(1, 3)  # [B,H,G,T,D]
            weighted = (weights[..., None] * out.precision).movedim(1, 3)[..., None] * error
            J = product(weighted.mT, error)
        return F, C, J, fading, growth

    def shapes(self, design: Any, state: State) -> tuple[tuple[int, ...], ...]:
        """F, C and J are D×D for each group; ρ and γ are numbers."""
        del design
        matrices = tuple(state.covariance.shape)
        return (matrices,) * 3 + (matrices[:2],) * 2

    def passed(self, design: Any, element: Element, state: State) -> State:
        """By one solve for all columns of P."""
        del design
        F, C, J, fading, growth = element
        P = state.covariance
        identity = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
        fading, growth = (number[..., None, None, None] for number in (fading, growth))
        known = torch.linalg.solve(growth * identity + P @ J, P)
        P = C + fading * (F @ known @ F.mT)
        return state._replace(covariance=(P + P.mT) / 2)


def _scales(scale: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of each token's information, [B,T,H], and ρ and γ, [B,H], with every factor at most 1.

    Let Π_t be the product of all scales up to t. Information of token t counts Π_t, and the covariance is scaled by
    Π_T: in all ρ Π₊, where ρ is the product of the scales below 1, and γ = 1/Π₊ that of the inverses of the others.
    """
    one = like.new_ones(like.shape[:-1])
    if scale is None:
        return one, one[:, 0], one[:, 0]
    fading, inverse = scale.clamp(max=1.0), 1 / scale.clamp(min=1.0)
    faded = fading.cumprod(1)
    later = torch.cat((inverse[:, 1:], one[:, :1]), 1).flip(1).cumprod(1).flip(1)
    return faded * later, faded[:, -1], inverse[:, 0] * later[:, 0]


class MeanMap(Passage):
    r"""$M \mapsto FM + B$ in each group of columns with gains of their own.

    Args:
        per_column: what a step parameter with an axis of value columns belongs to: "gain" if a column has its own gain,
            "value" if all columns have the same and the parameter is part of what is written.
    """

    def __init__(self, per_column: Literal["gain", "value"] = "gain") -> None:
        self.per_column = per_column

    def element(self, design: Any, x: Any, start: State, run: Probe) -> Element:
        """A run whose columns are those of the values, from 0, and in each group those of I, without values."""
        D, M = x.k.shape[-1], x.v.shape[-1]
        G = design.gain_groups(M)
        columns = M // G
        parameters = {p.name: self._widened(p, x.parameters[p.name], D) for p in design.step_parameters}
        values = torch.nn.functional.pad(x.v.unflatten(-1, (G, columns)), (0, D)).flatten(-2)
        identity = torch.eye(D, dtype=x.k.dtype, device=x.k.device)
        mean = torch.nn.functional.pad(identity, (columns, 0)).repeat(1, G)
        initial = start._replace(mean=mean.expand(*start.mean.shape[:2], *mean.shape))
        after = run(design, x._replace(q=x.k, v=values, parameters=parameters), initial).state.mean
        B, F = after.unflatten(-1, (G, columns + D)).split((columns, D), -1)
        return F.movedim(-2, 2).double(), B.flatten(-2).double()

    def _widened(self, parameter: Any, value: Tensor, D: int) -> Tensor:
        """A step parameter for D more columns in each group."""
        if "M" not in parameter.axes:
            return value
        axis = parameter.axes.index("M") - len(parameter.axes)
        if self.per_column == "gain":  # each column is a group
            return value.repeat_interleave(1 + D, axis)
        return torch.nn.functional.pad(value.movedim(axis, -1), (0, D)).movedim(-1, axis)

    def shapes(self, design: Any, state: State) -> tuple[tuple[int, ...], ...]:
        """F for each group, and B."""
        B, H, D, M = state.mean.shape
        return (B, H, design.gain_groups(M), D, D), (B, H, D, M)

    def passed(self, design: Any, element: Element, state: State) -> State:
        """F M + B."""
        del design
        F, B = element
        mean = (F @ state.mean.unflatten(-1, (F.shape[2], -1)).movedim(-2, 2)).movedim(2, -2).flatten(-2)
        return state._replace(mean=mean + B)


class FadingSums(Passage):
    r"""$s \mapsto f s + b$ for every number of a state, with one factor $f = \prod_t f_t$ for all of them.

    Args:
        factor: f_t from step parameters, [B,T,H].
        parts: the fields of the state that are such sums; None for all.
    """

    def __init__(self, factor: Callable[[Mapping[str, Tensor]], Tensor], parts: tuple[str, ...] | None = None) -> None:
        self.factor, self.parts = factor, parts

    def element(self, design: Any, x: Any, start: State, run: Probe) -> Element:
        """A run that starts from the prior, of which f times the prior is taken off."""
        B, _, H, D = x.k.shape
        prior = design.prior(Sizes(B, H, D, x.v.shape[-1]), dtype=x.k.dtype, device=x.k.device)
        begin = self._with(start, self._of(prior))
        after = self._of(run(design, x, begin).state)
        factor = self.factor(x.parameters).double().prod(1)
        added = [y.double() - _like(factor, s) * s.double() for s, y in zip(self._of(prior), after, strict=True)]
        return factor, *added

    def shapes(self, design: Any, state: State) -> tuple[tuple[int, ...], ...]:
        """f, and b of every part."""
        del design
        parts = [tuple(s.shape) for s in self._of(state)]
        return parts[0][:2], *parts

    def passed(self, design: Any, element: Element, state: State) -> State:
        """f s + b."""
        del design
        factor, *added = element
        parts = [_like(factor, s) * s + b for s, b in zip(self._of(state), added, strict=True)]
        return self._with(state, parts)

    def _of(self, state: State) -> list[Tensor]:
        names = state._fields if self.parts is None else self.parts
        return [getattr(state, name) for name in names]

    def _with(self, state: State, parts: list[Tensor]) -> State:
        names = state._fields if self.parts is None else self.parts
        return state._replace(**dict(zip(names, parts, strict=True)))


def _like(factor: Tensor, s: Tensor) -> Tensor:
    """A number for each sequence and head, [B,H], with the axes of s."""
    return factor.view(*factor.shape, *[1] * (s.ndim - 2))


class Inside(Passage):
    """A passage of the design that another one wraps.

    Args:
        name: the field of the state, and of the design, that holds the wrapped one.
        passage: of the wrapped design.
    """

    def __init__(self, name: str, passage: Passage) -> None:
        self.name, self.passage = name, passage

    def element(self, design: Any, x: Any, start: State, run: Probe) -> Element:
        """With the wrapped design's own step parameters."""
        inner = getattr(design, self.name)
        parameters = {p.name: x.parameters[p.name] for p in inner.step_parameters}
        return self.passage.element(inner, x._replace(parameters=parameters), getattr(start, self.name), run)

    def shapes(self, design: Any, state: State) -> tuple[tuple[int, ...], ...]:
        """As the wrapped design has it."""
        return self.passage.shapes(getattr(design, self.name), getattr(state, self.name))

    def passed(self, design: Any, element: Element, state: State) -> State:
        """In the field of the wrapped design."""
        after = self.passage.passed(getattr(design, self.name), element, getattr(state, self.name))
        return state._replace(**{self.name: after})
