"""Findings that are known: they are counted and do not fail a run, unless it is `--strict`.

A row is deleted with the repair of what it names; from then on its cases must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzzing.cases import Case, Problem


class Known(NamedTuple):
    """A finding with a name, and which findings it explains."""

    name: str
    explains: Callable[[Case, Problem, str], bool]


def _sure_writes(case: Case, problem: Problem, finding: str) -> bool:
    """Gradients of writes that are far surer than memory cancel inside a chunk (docs/chunk-form.md, "Sure writes")."""
    del problem
    corrects = case.spec.write == "observe"
    sure = case.keys != "usual" or case.noises["write_noise"] != "usual" or case.noises["process_noise"] != "usual"
    return corrects and case.chunked and sure and finding.startswith("gradient")


KNOWN: tuple[Known, ...] = (Known("gradients of sure writes in chunks", _sure_writes),)


def explanation(case: Case, problem: Problem, finding: str) -> str | None:
    """The name of the known finding that explains this one."""
    return next((known.name for known in KNOWN if known.explains(case, problem, finding)), None)
