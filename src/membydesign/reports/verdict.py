"""Say what a result means for the paper's claims; a smoke run means nothing for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from membydesign.reports.comparison import NOT_AT_THIS_SIZE, claims_held, claims_verdict, exceptions, tested, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.reports.comparison import Check

SMOKE, PAPER = "smoke", "paper"
"""The preset that checks only that the pipeline runs, and the one that has the paper's settings."""


class Verdict(NamedTuple):
    """A verdict in words.

    Attributes:
        text: the words.
        good: whether ours is as the paper says; None if nothing was tested.
    """

    text: str
    good: bool | None = None


class Judge(NamedTuple):
    """Judges the comparisons of a run.

    Attributes:
        preset: the settings of the run.
    """

    preset: str

    @property
    def tests(self) -> bool:
        """Whether the preset tests claims."""
        return self.preset != SMOKE

    @property
    def settings(self) -> str:
        """A sentence for headlines of runs with other settings than the paper's; empty if there is nothing to say."""
        if not self.tests or self.preset == PAPER:
            return ""
        return f"These are results of the {self.preset} preset, not of the {PAPER} preset."

    def claims(self, comparisons: Sequence[Check], *, names: bool = True) -> Verdict:
        """Say how many claims hold and, with `names`, which do not."""
        if comparisons and not self.tests:
            return Verdict(f"{SMOKE}: not a test of the claims")
        text = claims_verdict(comparisons) if names else claims_held(comparisons)
        kept = tested(comparisons)
        return Verdict(text, all(c.agrees for c in kept) if kept else None)

    def exceptions(self, comparisons: Sequence[Check]) -> str:
        """Say in sentences which claims do not hold or were not tested; empty if there are none."""
        told = exceptions(comparisons) if self.tests else []
        return " ".join(f"{each[0].upper()}{each[1:]}." for each in told)

    def claim(self, comparisons: Sequence[Check]) -> Verdict:
        """Say whether a claim holds, by its comparisons."""
        if not self.tests:
            return Verdict("not tested")
        if not tested(comparisons):
            return Verdict(NOT_AT_THIS_SIZE)
        good = all(c.agrees for c in comparisons)
        return Verdict("holds" if good else "DOES NOT HOLD", good)

    def agreeing(self, comparisons: Sequence[Check]) -> str:
        """Say how many comparisons agree; empty if none was tested."""
        return verdict(comparisons) if self.tests and tested(comparisons) else ""

    def row(self, comparison: Check) -> Verdict:
        """Say whether one comparison agrees."""
        if not self.tests:
            return Verdict("")
        if not comparison.tested:
            return Verdict("not tested")
        return Verdict("yes" if comparison.agrees else "NO", comparison.agrees)
