"""Compare a statement of the paper with our result: a number or word, a rough value, a bound, an ordering."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Value = float | int | str

NOT_AT_THIS_SIZE = "not tested at this size"
"""The verdict on a claim that a run was too small to test."""


class Shown(NamedTuple):
    """The texts that tables show of a comparison."""

    paper: str
    ours: str
    tolerance: str


@dataclass(frozen=True)
class Check(ABC):
    """Compare something that the paper states with ours.

    Attributes:
        claim: what the paper claims, in a few words; reports group comparisons by claim.
        quantity: which number it is, or what is ordered.
        tested: whether the run was large enough to test the claim. If not, the comparison is shown without a verdict.
    """

    kind: ClassVar[str]

    claim: str
    quantity: str
    tested: bool = field(default=True, kw_only=True)

    @property
    @abstractmethod
    def agrees(self) -> bool:
        """Whether ours is as the paper says. A number that is not finite agrees with nothing."""

    @abstractmethod
    def shown(self) -> Shown:
        """Return what the paper says, ours, and how far apart they may be, in plain text."""

    def as_dict(self, *, tested: bool = True) -> dict[str, Any]:
        """Return the row of `metrics.json`; "agrees" is None for a comparison that was not tested."""
        row = {"kind": self.kind, **asdict(self)}
        if self.tested:
            del row["tested"]  # the default
        return {**row, "agrees": self.agrees if tested and self.tested else None}


@dataclass(frozen=True)
class Comparison(Check):
    """Compare one number of the paper with ours.

    Attributes:
        paper: the paper's value: a number, or a word such as "never".
        ours: our value.
        tolerance: how far apart two numbers may be and still agree; words must be equal.
    """

    kind: ClassVar[str] = "number"

    paper: Value
    ours: Value
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether ours is within the tolerance of the paper's."""
        if isinstance(self.paper, str) or isinstance(self.ours, str):
            return self.paper == self.ours
        return abs(self.ours - self.paper) <= self.tolerance

    def shown(self) -> Shown:
        """Show the paper's digits as printed, and three more of ours."""
        if isinstance(self.paper, str) or isinstance(self.ours, str) or not self.tolerance:
            return Shown(str(self.paper), str(self.ours), "exact")
        decimals = _decimals(self.paper, self.tolerance)
        return Shown(f"{self.paper:.{decimals}f}", f"{self.ours:.{decimals + 3}f}", f"{self.tolerance:.2g}")


@dataclass(frozen=True)
class About(Check):
    """Compare with a number that the paper gives roughly ("about 88 %") or that must be read off a figure.

    Attributes:
        paper: the rough value.
        ours: our value.
        within: how far from it still counts as that: our reading, not the paper's.
    """

    kind: ClassVar[str] = "about"

    paper: float
    ours: float
    within: float

    def __post_init__(self):
        if not self.within > 0:
            raise ValueError(f"within: expected a number above 0 for {self.quantity!r}, got {self.within!r}")

    @property
    def agrees(self) -> bool:
        """Whether ours is that near."""
        return abs(self.ours - self.paper) <= self.within

    def shown(self) -> Shown:
        """Show the paper's value behind ≈."""
        decimals = _decimals(self.paper, self.within)
        return Shown(f"≈ {self.paper:.{decimals}f}", f"{self.ours:.{decimals + 2}f}", f"{self.within:.2g}")


_RELATION = re.compile(r"\s*(>=|<=|[><≥≤])\s*([-+−]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*")


@dataclass(frozen=True)
class Bound(Check):
    """Compare with a threshold of the paper that ours is above or below.

    Attributes:
        paper: the threshold, as "> 0", "≥ 0.88", "< 1e-6" or "≤ 3".
        ours: our value.
    """

    kind: ClassVar[str] = "bound"

    paper: str
    ours: float

    def __post_init__(self):
        self._parts()

    def _parts(self) -> tuple[str, float]:
        relation = _RELATION.fullmatch(self.paper)
        if relation is None:
            expected = 'expected >, ≥, < or ≤ and a number, such as "> 0"'
            raise ValueError(f"paper: {expected}, for {self.quantity!r}, got {self.paper!r}")
        return relation[1], float(relation[2].replace("−", "-"))

    @property
    def agrees(self) -> bool:
        """Whether ours is on the paper's side of the threshold."""
        relation, threshold = self._parts()
        if relation in (">", "<"):
            return self.ours > threshold if relation == ">" else self.ours < threshold
        return self.ours >= threshold if relation in ("≥", ">=") else self.ours <= threshold

    def shown(self) -> Shown:
        """Show the threshold as it was stated, and enough digits of ours to see on which side it is."""
        return Shown(self.paper, numbers([self.ours, self._parts()[1]])[0], "—")


@dataclass(frozen=True)
class Ordering(Check):
    """Compare the order of several values. `lowest`, `highest` and `rising` make the usual ones.

    Attributes:
        order: groups of names from low to high: each value is below each of the next group.
        ours: our values by name.
        margin: values must be further apart than this.
    """

    kind: ClassVar[str] = "ordering"

    order: list[list[str]]
    ours: dict[str, float]
    margin: float = 0.0

    def __post_init__(self):
        names = [name for group in self.order for name in group]
        if Counter(names) != Counter(self.ours.keys()):
            raise ValueError(f"order: expected each of {sorted(self.ours)} once, got {self.order}")
        if len(self.order) < 2 or not all(self.order):
            raise ValueError(f"order: expected two groups or more, none empty, got {self.order}")
        if not self.margin >= 0:
            raise ValueError(f"margin: expected at least 0 for {self.quantity!r}, got {self.margin!r}")

    @property
    def agrees(self) -> bool:
        """Whether the order holds, by more than the margin everywhere."""
        return all(
            self.ours[high] - self.ours[low] > self.margin
            for lower, higher in pairwise(self.order)
            for low in lower
            for high in higher
        )

    def shown(self) -> Shown:
        """Show the order, then our values from low to high."""
        ours = dict(sorted(self.ours.items(), key=lambda item: (math.isnan(item[1]), item[1])))
        listed = (f"{name} {text}" for name, text in zip(ours, numbers(ours.values()), strict=True))
        return Shown(self._statement(), ", ".join(listed), f"by > {self.margin:g}" if self.margin else "—")

    def _statement(self) -> str:
        first, *_, last = self.order
        if len(self.order) == 2 and len(first) == 1 < len(last):
            return f"{first[0]} lowest"
        if len(self.order) == 2 and len(last) == 1 < len(first):
            return f"{last[0]} highest"
        return " < ".join(", ".join(group) for group in self.order)


def lowest(claim: str, quantity: str, name: str, ours: Mapping[str, float], margin: float = 0.0) -> Ordering:
    """State that `name` is below all others, by more than the margin."""
    return Ordering(claim, quantity, [[name], [other for other in ours if other != name]], dict(ours), margin)


def highest(claim: str, quantity: str, name: str, ours: Mapping[str, float], margin: float = 0.0) -> Ordering:
    """State that `name` is above all others, by more than the margin."""
    return Ordering(claim, quantity, [[other for other in ours if other != name], [name]], dict(ours), margin)


def rising(claim: str, quantity: str, names: Sequence[str], ours: Mapping[str, float], margin: float = 0.0) -> Ordering:
    """State that values rise in the order of `names`, each step by more than the margin."""
    return Ordering(claim, quantity, [[name] for name in names], dict(ours), margin)


def printed(claim: str, quantity: str, paper: str, ours: float, *, rounded_twice: bool = False) -> Comparison:
    """Compare with a number as the paper prints it: ours must round to the same digits.

    Args:
        claim: what the paper claims.
        quantity: which number it is.
        paper: the digits as printed; half a unit of the last one is the tolerance.
        ours: our value.
        rounded_twice: for a row whose printed digit comes out only if it was rounded in two steps (−0.3448 → −0.345 →
            −0.35). It is marked as such, and its tolerance is 0.55 of a unit.
    """
    unit = 10.0 ** -len(paper.partition(".")[2])
    if rounded_twice:
        return Comparison(claim, f"{quantity} (paper rounded twice)", float(paper), ours, 0.55 * unit)
    return Comparison(claim, quantity, float(paper), ours, 0.5 * unit)


KINDS: dict[str, type[Check]] = {each.kind: each for each in (Comparison, About, Bound, Ordering)}
"""The "kind" of a row of `metrics.json` → its class."""


def check_of(row: Mapping[str, Any]) -> Check:
    """Read a comparison from a row of `metrics.json`; a row without a kind is a number."""
    kind = row.get("kind", Comparison.kind)
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    kept = {"tested": True, **row}
    return KINDS[kind](**{each.name: kept[each.name] for each in fields(KINDS[kind])})


def by_claim(comparisons: Iterable[Check]) -> dict[str, list[Check]]:
    """Group comparisons by claim, in order."""
    claims: dict[str, list[Check]] = {}
    for comparison in comparisons:
        claims.setdefault(comparison.claim, []).append(comparison)
    return claims


def tested(comparisons: Iterable[Check]) -> list[Check]:
    """Return the comparisons of claims that the run was large enough to test."""
    return [c for rows in by_claim(comparisons).values() if all(row.tested for row in rows) for c in rows]


def untested(comparisons: Iterable[Check]) -> list[str]:
    """Return the claims that the run was too small to test."""
    return [claim for claim, rows in by_claim(comparisons).items() if not all(row.tested for row in rows)]


def failing(comparisons: Iterable[Check]) -> list[str]:
    """Return the tested claims that do not hold: those of which a comparison disagrees."""
    return [claim for claim, rows in by_claim(tested(comparisons)).items() if not all(c.agrees for c in rows)]


def verdict(comparisons: Sequence[Check]) -> str:
    """Say how many of the tested comparisons agree."""
    kept = tested(comparisons)
    return f"{sum(c.agrees for c in kept)} of {len(kept)} comparisons agree"


def claims_held(comparisons: Sequence[Check]) -> str:
    """Say how many of the tested claims hold."""
    total = len(by_claim(tested(comparisons)))
    if not total:
        return f"no claim was {'tested at this size' if comparisons else 'compared'}"
    return f"{total - len(failing(comparisons))} of {total} {'claim holds' if total == 1 else 'claims hold'}"


def exceptions(comparisons: Sequence[Check]) -> list[str]:
    """Say which of the tested claims do not hold, and which claims were not tested while others were."""
    lost, small = failing(comparisons), untested(comparisons)
    told = [f"{'this does' if len(lost) == 1 else 'these do'} not: {'; '.join(lost)}"] if lost else []
    if small and len(small) < len(by_claim(comparisons)):
        told.append(f"{NOT_AT_THIS_SIZE}: {'; '.join(small)}")
    return told


def claims_verdict(comparisons: Sequence[Check]) -> str:
    """Say how many of the tested claims hold, which do not, and which were not tested."""
    return "; ".join([claims_held(comparisons), *exceptions(comparisons)])


def numbers(values: Iterable[float]) -> list[str]:
    """Format numbers to four digits, or to as many as it takes for different ones to look different."""
    values = list(values)
    different = {v for v in values if not math.isnan(v)}
    digits = next((d for d in range(4, 17) if len({_number(v, d) for v in different}) == len(different)), 17)
    return [_number(v, digits) for v in values]


def _number(value: float, digits: int) -> str:
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e15 else f"{value:.{digits}g}"


def _decimals(value: float, tolerance: float) -> int:
    """Return the decimals that the tolerance resolves, or more if `value` has more."""
    decimals = max(0, math.floor(-math.log10(tolerance)))
    while decimals < 12 and abs(round(value, decimals) - value) > tolerance / 100:
        decimals += 1
    return decimals
