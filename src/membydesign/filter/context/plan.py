"""Which tokens of a sequence each process holds, and who needs what from whom."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from membydesign.errors import check_whole_number
from membydesign.filter.checks import check_cu_seqlens, refuse
from membydesign.filter.context.exchange import anchored, from_last, receive, send, tied
from membydesign.state import map_state, named_tensors

if TYPE_CHECKING:
    from membydesign.design import Design
    from membydesign.design.protocol import State

Schedule = Literal["auto", "scan", "pipeline"]

COST_OF_SCAN = {"covariance": 4.0, "mean": 2.5}
"""How much longer a process computes in a scan than if it knew the belief before its first token, for designs whose
covariance must be passed on, and for others (docs/howto/context-parallel.md has the measurements)."""


@dataclass(frozen=True)
class Stretch:
    """This process's stretch of tokens of a sequence, or of packed sequences, split in time over processes.

    Process r of a group holds the tokens that follow those of process r−1; any process may hold any number of them,
    also none. `Stretch.of` finds out who holds how many, once for all filters of a forward pass.

    Attributes:
        group: the processes, in the order of time.
        rank: of this process in the group.
        lengths: how many tokens each process holds.
        bounds: of sequences packed into the whole row, [N+1]; None for a batch of sequences as long as the row.
        schedule: "scan" if all processes filter at the same time, "pipeline" if each waits for the belief of the one
            before, "auto" for what should take less time with this number of processes.
        layers: how many filters follow one another in a forward pass, which a pipeline overlaps.
    """

    group: Any
    rank: int
    lengths: tuple[int, ...]
    bounds: tuple[int, ...] | None = None
    schedule: Schedule = "auto"
    layers: int = 1

    @staticmethod
    def of(
        x: Tensor,
        *,
        group: Any = None,
        cu_seqlens: Tensor | None = None,
        schedule: Schedule = "auto",
        layers: int = 1,
    ) -> Stretch:
        """Tell all processes how many tokens this one holds; all of the group must call this together.

        Args:
            x: anything with the axes [B,T,...] of this process's tokens.
            group: a `torch.distributed` process group, by default that of all processes. Give it no other traffic, such
                as DDP's, which runs at times of its own.
            cu_seqlens: boundaries of sequences that are packed into the whole row, [N+1], the same in every process:
                they count the tokens of all processes.
            schedule: "auto", "scan" or "pipeline".
            layers: how many filters follow one another.
        """
        if not dist.is_available() or not dist.is_initialized():
            refuse("group", "torch.distributed.init_process_group to be called first", "no process group")
        if schedule not in get_args(Schedule):
            refuse("schedule", '"auto", "scan" or "pipeline"', repr(schedule))
        check_whole_number("layers", layers, 1)
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        if rank < 0:
            refuse("group", "one that this process belongs to", "another one")
        own = torch.tensor([x.shape[1]], device=x.device)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group)
        lengths = tuple(torch.cat(every).tolist())
        bounds = None
        if cu_seqlens is not None:
            whole = torch.empty(x.shape[0], sum(lengths), device="meta")
            bounds = tuple(check_cu_seqlens(cu_seqlens, whole))
        return Stretch(group, rank, lengths, bounds, schedule, layers)

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many tokens this process holds."""
        return self.lengths[self.rank]

    @property
    def start(self) -> int:
        """The position of its first token in the whole row."""
        return sum(self.lengths[: self.rank])

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.tokens

    @property
    def sequences(self) -> range | None:
        """Which of the packed sequences have tokens here; None for a batch."""
        if self.bounds is None:
            return None
        pairs = zip(self.bounds, self.bounds[1:], strict=False)
        here = [n for n, (a, b) in enumerate(pairs) if max(a, self.start) < min(b, self.end)]
        return range(here[0], here[-1] + 1) if here else range(0)

    def own_bounds(self) -> list[int] | None:
        """Boundaries of the packed sequences among this process's tokens; None for a batch, or without tokens."""
        if self.bounds is None or not self.tokens:
            return None
        assert self.sequences is not None
        inside = [self.bounds[n] - self.start for n in self.sequences]
        return [0, *inside[1:], self.tokens]

    @property
    def before(self) -> int:
        """How many tokens earlier processes hold of the sequence that this one's first token continues."""
        if self.bounds is None:
            return self.start
        return self.start - max(b for b in self.bounds if b <= self.start) if self.tokens else 0

    @property
    def after(self) -> int:
        """How many tokens its last sequence has up to the end of this stretch, those of earlier processes included."""
        if self.bounds is None:
            return self.end
        return self.end - max(b for b in self.bounds if b < self.end)

    @property
    def enters(self) -> bool:
        """Whether a belief comes from the process before: always in a batch, whoever holds tokens."""
        return self.rank > 0 if self.bounds is None else self.before > 0

    @property
    def leaves(self) -> bool:
        """Whether the next process goes on from this one's last belief."""
        if self.bounds is None:
            return self.rank < self.size - 1
        return self.tokens > 0 and self.end < self.bounds[-1] and self.end not in self.bounds

    @property
    def previous(self) -> int:
        """The process that hands a belief to this one: in packed rows, the last before it that holds tokens."""
        if self.bounds is None:
            return self.rank - 1
        return max(r for r in range(self.rank) if self.lengths[r])

    @property
    def next(self) -> int:
        """The process that goes on from this one."""
        if self.bounds is None:
            return self.rank + 1
        return min(r for r in range(self.rank + 1, self.size) if self.lengths[r])

    def chain(self) -> list[int]:
        """The processes that hold the tokens before this one's of the sequence that its first token continues."""
        starts = accumulate(self.lengths, initial=0)
        first = self.start - self.before
        return [
            r for r, start in enumerate(starts) if r < self.rank and self.lengths[r] and start + self.lengths[r] > first
        ]

    def own(self, states: State) -> State:
        """Of the states of all packed sequences, those of the sequences that have tokens here; all of a batch."""
        chosen = self.sequences
        return states if chosen is None else map_state(lambda x: x[chosen.start : chosen.stop], states)

    def with_past(self, x: Tensor, n: int) -> tuple[Tensor, int]:
        """Put up to n tokens of earlier processes in front of x, [B,T,...], as far as the same sequence has them.

        Returns:
            The longer x, and how many tokens are new.
        """
        past = min(n, self.before)
        following = min(n, self.after) if self.leaves else 0
        anchor, exchanged = anchored([x]), []
        at_once = following <= x.shape[1]
        if following and at_once:
            exchanged.append(send([x[:, x.shape[1] - following :]], anchor, self.next, self.group))
        if past:
            shape = torch.Size((x.shape[0], past, *x.shape[2:]))
            (received,) = receive([shape], x, anchor, self.previous, self.group)
            x = torch.cat((received, x), 1)
        if following and not at_once:
            exchanged.append(send([x[:, x.shape[1] - following :]], anchor, self.next, self.group))
        return tied(x, exchanged), past

    def last(self, state: State) -> State:
        """The state of the last process, in every process, with gradients: the belief after the whole sequence."""
        every = iter(from_last([x for _, x in named_tensors(state)], self.group))
        return map_state(lambda _: next(every), state)

    def scans(self, design: Design) -> bool:
        """Whether processes filter at the same time.

        Raises:
            ValueError: if the schedule is "scan" and the design has no maps of a stretch, with the reason.
        """
        passages = design.passages()
        if isinstance(passages, str):
            if self.schedule == "scan":
                refuse("schedule", f'"pipeline" (or "auto") for {design.title}, {passages}', '"scan"')
            return False
        if self.schedule != "auto":
            return self.schedule == "scan"
        cost = COST_OF_SCAN["covariance" if len(passages) > 1 else "mean"]
        return cost < (self.layers + self.size - 1) / self.layers
