"""A filter over this process's stretch: first the belief that it starts from, then the filter as it is.

In a scan every process learns what its tokens do to any belief, part by part (`Design.passages`), tells all others, and
applies the maps of the processes before it to the belief at the start of the sequence. In a pipeline it waits for the
belief of the process before.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from membydesign.filter import checks
from membydesign.filter.context.exchange import anchored, gather, receive, send, tied
from membydesign.filter.device_checks import Arguments, check_before
from membydesign.filter.inputs import Inputs, Request, Run
from membydesign.filter.kernels import choose, run_all
from membydesign.state import Sizes, map_state, named_tensors, zip_states

if TYPE_CHECKING:
    from collections.abc import Mapping

    from membydesign.design import Design
    from membydesign.design.protocol import State
    from membydesign.filter.context.plan import Stretch


class Own(NamedTuple):
    """What this process filters.

    Attributes:
        x: its tokens.
        initial: the state before the first token of each of its sequences, whichever process holds that token.
        dtype: of states.
        bounds: of its packed sequences, or None.
        anchor: a place in the graph of all arguments.
    """

    x: Inputs
    initial: State
    dtype: torch.dtype
    bounds: list[int] | None
    anchor: Tensor

    @property
    def last_piece(self) -> Inputs:
        """The tokens that the next process goes on from: those of the last sequence."""
        return self.x if self.bounds is None else self.x.between(self.bounds[-2], self.bounds[-1])

    def entry_of_last(self, entry: State) -> State:
        """The state before the last piece: `entry`, unless the piece begins its sequence here."""
        return entry if self.bounds is None or len(self.bounds) == 2 else _one(self.initial, -1)

    def entered_with(self, entry: State) -> State:
        """The states that all sequences of this process start from."""
        if self.bounds is None:
            return entry
        return zip_states(lambda parts: torch.cat((parts[1], parts[0][1:])), [self.initial, entry])


def own_of(
    design: Design,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parameters: Mapping[str, Any],
    stretch: Stretch,
    initial: State,
    state_dtype: torch.dtype | None,
) -> Own:
    """Check the arguments of `filter_sequence` for this process's tokens."""
    if q.ndim != 4 or q.shape[1] != stretch.tokens:
        checks.refuse("q", f"[B,T,H,D] with the T = {stretch.tokens} tokens of the stretch", f"shape {list(q.shape)}")
    batch = q.shape[0] if stretch.bounds is None else len(stretch.bounds) - 1
    if stretch.tokens:
        x = checks.check_inputs(design, q, k, v, parameters, lead="B,T,H", state_dtype=state_dtype, state=initial)
        dtype = x.q.dtype
    else:
        x, dtype = Inputs(q, k, v, {}), _widest(q, parameters, state_dtype)
    M = v.shape[-1]
    dtype = reduce(torch.promote_types, [dtype, *(s.dtype for _, s in named_tensors(initial))])
    if initial is None:
        initial = design.prior(Sizes(batch, q.shape[2], q.shape[3], M), dtype=dtype, device=q.device)
    else:
        initial = checks.check_state(design, initial, "initial", batch, q, M)
    if stretch.tokens:  # other processes would see what is wrong here, and could not say where it comes from
        check_before(Arguments(design, x, initial, "initial", thorough=True))
    anchor = anchored([q, k, v, *_tensors(parameters), *(s for _, s in named_tensors(initial))])
    initial = map_state(lambda s: s.to(dtype), stretch.own(initial))
    return Own(x.map(lambda t: t.to(dtype)), initial, dtype, stretch.own_bounds(), anchor)


def _widest(q: Tensor, parameters: Mapping[str, Any], state_dtype: torch.dtype | None) -> torch.dtype:
    return reduce(torch.promote_types, (t.dtype for t in [q, *_tensors(parameters)]), state_dtype or torch.float32)


def _tensors(parameters: Mapping[str, Any]) -> list[Tensor]:
    return [p for p in parameters.values() if isinstance(p, Tensor) and p.is_floating_point()]


def enter(design: Design, own: Own, stretch: Stretch, backend: str) -> tuple[State, list[Tensor]]:
    """The state before this process's first token, and what it must be tied to."""
    first = _one(own.initial, 0) if stretch.bounds is not None and stretch.tokens else own.initial
    if stretch.scans(design):
        return _scan(design, own, first, stretch, backend)
    if not stretch.enters:
        return first, []
    like = next(s for _, s in named_tensors(first))
    every = iter(receive([s.shape for _, s in named_tensors(first)], like, own.anchor, stretch.previous, stretch.group))
    return map_state(lambda _: next(every), first), []


def leave(design: Design, own: Own, state: State, stretch: Stretch) -> list[Tensor]:
    """Hand the state after the last token to the next process, if that waits for it; return what to tie results to."""
    if not stretch.leaves or stretch.scans(design):
        return []
    last = state if stretch.bounds is None else _one(state, -1)
    return [send([s for _, s in named_tensors(last)], own.anchor, stretch.next, stretch.group)]


def _scan(design: Design, own: Own, first: State, stretch: Stretch, backend: str) -> tuple[State, list[Tensor]]:
    """Pass the first state through the stretches of the processes before, part by part."""
    passages = design.passages()
    assert not isinstance(passages, str)
    # probes may need what the backend that the user named cannot run, such as float64
    run = Probe(backend if backend in ("auto", "torch") else "auto")
    if stretch.bounds is not None and not stretch.tokens:  # part of no sequence, but it takes part in exchanges
        first = map_state(lambda s: s.new_zeros(1, *s.shape[1:]), first)
    entry, exchanged = map_state(lambda s: s.double(), first), []
    for passage in passages:
        known = map_state(lambda s: s.to(own.dtype), entry)
        if stretch.leaves and stretch.tokens:
            element = passage.element(design, own.last_piece, own.entry_of_last(known), run)
        else:
            zero = own.x.q.new_zeros((), dtype=torch.float64)
            element = tuple(zero.expand(shape) for shape in passage.shapes(design, first))
        # each exchange follows the one before it also where its own part does not depend on that
        parts = [tied(element[0].double(), exchanged), *(e.double() for e in element[1:])]
        every = gather(parts, own.anchor, stretch.group)
        exchanged = [every[0][0].flatten()[:1]]
        if stretch.enters:
            for r in stretch.chain():
                entry = passage.passed(design, tuple(every[r]), entry)
    return map_state(lambda s: s.to(own.dtype), entry), exchanged


class Probe:
    """Runs a filter without checks of its results, which are not the user's."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(self, design: Design, x: Inputs, initial: State) -> Run:
        """Filter one batch."""
        request = Request(x, initial, x.q.dtype, self.backend)
        (run,) = run_all(design, request, choose(design, request, "chunk"))
        return run


def _one(states: State, n: int) -> State:
    return map_state(lambda s: s[n:][:1], states)


def tied_results(results: Any, exchanged: list[Tensor]) -> Any:
    """Results in which backward reaches every exchange."""
    return map_state(lambda x: tied(x, exchanged), results) if exchanged else results
