"""Random problems for any design: arguments of `filter_sequence` that respect its schema."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from membydesign.filter import Filtered, filter_sequence, filter_step
from membydesign.state import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from membydesign.design import Design


@dataclass(frozen=True)
class Problem:
    """Arguments of `filter_sequence` for one design.

    Attributes:
        design: the assumptions.
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: values, [B,T,H,M].
        parameters: step parameters by name.
        options: how to filter, such as `method` and `backend`.
    """

    design: Design
    q: Tensor
    k: Tensor
    v: Tensor
    parameters: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        """B, H, D and M."""
        B, _, H, D = self.q.shape
        return Sizes(B, H, D, self.v.shape[-1])

    def prior(self) -> Any:
        """The state before the first token."""
        return self.design.prior(self.sizes, dtype=torch.promote_types(self.q.dtype, torch.float32), device="cpu")

    def filter(self, **options: Any) -> Filtered:
        """Run `filter_sequence`."""
        return filter_sequence(self.design, self.q, self.k, self.v, **self.parameters, **self.options, **options)

    def step(self, state: Any, t: int) -> tuple[Tensor, Any]:
        """Run `filter_step` on the token at position t."""
        now = {name: x[:, t] for name, x in self.parameters.items()}
        return filter_step(self.design, state, self.q[:, t], self.k[:, t], self.v[:, t], **now)

    def map(self, f: Callable[[Tensor], Tensor]) -> Problem:
        """The same problem with f applied to every tensor."""
        parameters = {name: f(x) for name, x in self.parameters.items()}
        return replace(self, q=f(self.q), k=f(self.k), v=f(self.v), parameters=parameters)

    def between(self, start: int, end: int) -> Problem:
        """Positions start to end − 1."""
        return self.map(lambda x: x[:, start:end])


def random_problem(
    design: Design,
    *,
    B: int = 2,
    T: int = 7,
    H: int = 2,
    D: int = 4,
    M: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Problem:
    """Keys of about unit norm, variances between 0.05 and 2, decays between 0.6 and 1, any angle, weights in (0, 1).

    Parameters without a bound are angles between −3.1 and 3.1. Keys and values that a design bounds below by 0 are the
    magnitudes of normal numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, bound: str = "finite") -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x if bound == "finite" else x.abs()

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    ranges = {"<= 0": (-0.5, 0.0), "finite": (-3.1, 3.1), "[0, 1]": (0.05, 0.95)}
    parameters = {}
    for parameter in design.step_parameters:
        shape = (B, T, H, *parameter.sizes(D, M, design.groups))
        if parameter.bound in ranges:
            parameters[parameter.name] = uniform(*ranges[parameter.bound], *shape)
        else:
            parameters[parameter.name] = uniform(-3.0, 0.7, *shape).exp()
    q, k = normal(B, T, H, D, bound=design.key_bound), normal(B, T, H, D, bound=design.key_bound) / D**0.5
    problem = Problem(design, q, k, normal(B, T, H, M, bound=design.value_bound), parameters)
    return problem.map(lambda x: x.to(dtype))


def state_after(problem: Problem) -> Any:
    """A state that is not the prior: the one after a random problem of the same sizes, in float64."""
    return problem.map(lambda x: x.double()).filter().belief
