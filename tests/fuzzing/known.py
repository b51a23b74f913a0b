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
    """Gradients of writes that are far surer than memory cancel inside a chunk.

    docs/internals/chunk-form.md describes them under "Sure writes".
    """
    del problem
    corrects = case.spec.write == "observe"
    sure = case.keys != "usual" or case.noises["write_noise"] != "usual" or case.noises["process_noise"] != "usual"
    return corrects and case.chunked and sure and finding.startswith("gradient")


def _noise_in_chunks(case: Case, problem: Problem, finding: str) -> bool:
    """Sure writes after large process noise cancel inside a chunk, which float64 has no wider type for."""
    del problem
    large = case.noises["process_noise"] in ("large", "mixed")
    return case.spec.kept == "dense" and case.chunked and large and not finding.startswith(("raised", "gradient"))


def _additive_trust(case: Case, problem: Problem, finding: str) -> bool:
    """λ/(λ + r²) does not depend on λ where r² is 0; its gradient there is a rounding error of 1/λ."""
    del problem
    silent = case.noises["write_noise"] in ("zero", "small", "mixed")
    return case.spec.write == "latent" and silent and finding.startswith("gradient of prior_variance")


KNOWN: tuple[Known, ...] = (
    Known("additive writes without noise: gradient of prior_variance", _additive_trust),
    Known("gradients of sure writes in chunks", _sure_writes),
    Known("sure writes after large process noise in chunks", _noise_in_chunks),
)


def explanation(case: Case, problem: Problem, finding: str) -> str | None:
    """The name of the known finding that explains this one."""
    return next((known.name for known in KNOWN if known.explains(case, problem, finding)), None)
