"""What a result says about the paper's claims, in words; a smoke run says nothing about them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from membydesign.experiments.comparison import claims_held, claims_verdict, verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.experiments.comparison import Check

SMOKE = "smoke"
"""The preset that checks only that the pipeline runs; its numbers are meaningless."""


class Verdict(NamedTuple):
    """A verdict in words.

    Attributes:
        text: the words.
        good: whether ours is as the paper says; None if nothing was tested.
    """

    text: str
    good: bool | None = None


class Judge(NamedTuple):
    """Judges comparisons if the preset that made them tests the claims.

    Attributes:
        tests: whether it does.
    """

    tests: bool

    @staticmethod
    def of(preset: str) -> Judge:
        """The judge of results of a preset."""
        return Judge(preset != SMOKE)

    def claims(self, comparisons: Sequence[Check], *, names: bool = True) -> Verdict:
        """How many claims hold and, with `names`, which do not."""
        if not comparisons or self.tests:
            text = claims_verdict(comparisons) if names else claims_held(comparisons)
            return Verdict(text, all(c.agrees for c in comparisons) if comparisons else None)
        return Verdict(f"{SMOKE}: not a test of the claims")

    def claim(self, comparisons: Sequence[Check]) -> Verdict:
        """Whether a claim holds, by its comparisons."""
        if not self.tests:
            return Verdict("not tested")
        good = all(c.agrees for c in comparisons)
        return Verdict("holds" if good else "DOES NOT HOLD", good)

    def agreeing(self, comparisons: Sequence[Check]) -> str:
        """How many comparisons agree; empty if that is not said."""
        return verdict(comparisons) if comparisons and self.tests else ""

    def row(self, comparison: Check) -> Verdict:
        """Whether one comparison agrees."""
        if not self.tests:
            return Verdict("")
        return Verdict("yes" if comparison.agrees else "NO", comparison.agrees)
