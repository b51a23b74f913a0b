"""The arguments of a filter after they were checked: one type, one shape each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from membydesign.design import Step
from membydesign.state import map_state, named_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from membydesign.design import Design


class Inputs(NamedTuple):
    """Checked arguments in the state's type.

    Attributes:
        q: queries, [B,T,H,D].
        k: write keys, [B,T,H,D].
        v: written values, [B,T,H,M].
        parameters: the design's step parameters by name, [B,T,H] with all axes that each declares.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    parameters: Mapping[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """All tensors by the names of the arguments."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.parameters}

    def step(self, t: int) -> Step:
        """The parameters and the key of the token at position t."""
        return Step({name: x[:, t] for name, x in self.parameters.items()}, self.k[:, t])

    def between(self, start: int, end: int) -> Inputs:
        """Positions start to end − 1."""
        return self.map(lambda x: x[:, start:end])

    def padded(self, length: int, design: Design) -> Inputs:
        """The same with tokens added at the end that leave memory as it is: a key of zero and idle parameters."""
        missing = length - self.q.shape[1]
        if not missing:
            return self
        idle: dict[str, Any] = {parameter.name: parameter.idle for parameter in design.step_parameters}

        def longer(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((len(x), missing, *x.shape[2:]), fill)], 1)

        q, k, v = (longer(x, 0.0) for x in self[:3])
        return Inputs(q, k, v, {name: longer(x, idle[name]) for name, x in self.parameters.items()})

    def map(self, f: Callable[[Tensor], Tensor]) -> Inputs:
        """The same inputs with f applied to each tensor."""
        return Inputs(f(self.q), f(self.k), f(self.v), {name: f(x) for name, x in self.parameters.items()})

    @staticmethod
    def stacked(rows: Sequence[Inputs]) -> Inputs:
        """Several inputs of one length as a batch."""
        q, k, v = (torch.cat(parts) for parts in zip(*(row[:3] for row in rows), strict=True))
        return Inputs(q, k, v, {name: torch.cat([row.parameters[name] for row in rows]) for name in rows[0].parameters})


LONGEST_CHUNK = 256
"""The most tokens in a chunk, whatever a user asks for: work and workspace grow with its square, accuracy falls."""


class Request(NamedTuple):
    """What a kernel is asked to compute.

    Attributes:
        x: the checked arguments.
        initial: the state to start from, one for each sequence.
        dtype: the type in which q, k and v were given.
        backend: as the user named it; "auto" lets a kernel decline what another computes better.
        chunk_size: tokens in a chunk, if the user named a number.
        return_variance: whether the variance of every read is needed.
        return_evidence: whether the log evidence of every write is needed.
        bounds: of packed sequences, [N+1]; None for a batch of sequences of one length.
    """

    x: Inputs
    initial: Any
    dtype: torch.dtype
    backend: str = "auto"
    chunk_size: int | None = None
    return_variance: bool = False
    return_evidence: bool = False
    bounds: Sequence[int] | None = None

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by the name of its argument."""
        yield from self.x.named().items()
        yield from named_tensors(self.initial, "initial")

    def map(self, f: Callable[[Tensor], Tensor]) -> Request:
        """The same request with f applied to each tensor."""
        return self._replace(x=self.x.map(f), initial=map_state(f, self.initial))

    def tokens_in_chunk(self, default: int) -> int:
        """Return how many tokens a chunk has: what the user chose or `default`, `LONGEST_CHUNK` or T at most."""
        return min(self.chunk_size or default, LONGEST_CHUNK, self.x.q.shape[1])


class Run(NamedTuple):
    r"""What a filter over [B,T] computed.

    Attributes:
        output: the read-outs, [B,T,H,M].
        state: the state after the last token.
        precision: $\beta_t$, [B,T,H,G], of designs that have one.
        variance: of the read-outs, [B,T,H,G], or None.
        write_log_evidence: $\log p(v_t \mid v_{<t})$, [B,T,H], or None.
        squares: $\beta_t \lVert v_t - \bar M_t^\top k_t \rVert^2$, [B,T,H,G], where a kernel has it, with the evidence.
    """

    output: Tensor
    state: Any
    precision: Tensor | None = None
    variance: Tensor | None = None
    write_log_evidence: Tensor | None = None
    squares: Tensor | None = None
