"""A design in words and formulas: `Design.describe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from membydesign.design.protocol import Design
    from membydesign.design.schema import Equation


@dataclass(frozen=True)
class Description:
    """A design described: `str()` for a terminal, `.latex` for a paper; notebooks render it as mathematics.

    Attributes:
        title: what people call the design.
        parts: (heading, equations) in the order of a step: assume, predict, write, keep, read.
        facts: (name, value) pairs: exactness, state, cost, parameters (one on each line), note, citation.
    """

    title: str
    parts: tuple[tuple[str, tuple[Equation, ...]], ...]
    facts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """The description as plain text."""
        width = max(len(name) for name, _ in (*self.parts, *self.facts)) + 2
        lines = [self.title]
        for heading, equations in self.parts:
            for i, equation in enumerate(equations):
                lines.append(f"  {heading if i == 0 else '':<{width}}{equation.text}")
        for name, value in self.facts:
            for i, line in enumerate(value.split("\n")):
                lines.append(f"  {name if i == 0 else '':<{width}}{line}")
        return "\n".join(lines)

    @property
    def latex(self) -> str:
        """The equations as one LaTeX `aligned` environment, without dollar signs."""
        rows = []
        for heading, equations in self.parts:
            for i, equation in enumerate(equations):
                label = rf"\text{{{heading}}}" if i == 0 else ""
                rows.append(rf"{label} &\quad {equation.latex}")
        body = " \\\\\n".join(rows)
        return f"\\begin{{aligned}}\n{body}\n\\end{{aligned}}"

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        facts = "\n".join(f"- {name}: {'; '.join(value.splitlines())}" for name, value in self.facts)
        return f"**{self.title}**\n\n$$\n{self.latex}\n$$\n\n{facts}"


def describe(design: Design) -> Description:
    """The description of a design; see `Design.describe`."""
    return Description(
        title=design.title,
        parts=tuple((heading, equations) for heading, equations in design.equations() if equations),
        facts=tuple((name, value) for name, value in _facts(design) if value),
    )


def _facts(design: Design) -> list[tuple[str, str]]:
    total, formula, cost = design.state_size(64, 64).total, design.state_formula(), design.cost(64, 64)
    parameters = "\n".join(f"{p.name} = {p.symbol}, {p.bound}, {p.shape}" for p in design.step_parameters)
    state = f"{formula} elements ({total:,} at D = M = 64)" if formula else f"{total:,} elements at D = M = 64"
    return [
        ("exactness", design.exactness),
        ("state per head", state),
        ("cost per token", f"{cost[0]} ({cost[1]:,} multiplications at D = M = 64)" if cost else ""),
        ("step parameters", parameters),
        ("note", design.note),
        ("citation", design.citation),
    ]
