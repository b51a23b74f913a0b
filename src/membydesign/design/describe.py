"""A design in words and formulas: `DesignModel.describe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from membydesign.design.covariance import Dense
from membydesign.design.equations import Equation
from membydesign.design.write import ObserveMemory

if TYPE_CHECKING:
    from membydesign.design.model import DesignModel

_DRIFT_OF_MEAN = Equation("M̄_t = A_t M_{t-1}", r"\bar{\mathbf{M}}_t = \mathbf{A}_t \mathbf{M}_{t-1}")
_READ = Equation("y_t = M_tᵀ q_t", r"\mathbf{y}_t = \mathbf{M}_t^\top \mathbf{q}_t")
_LATENT_COVARIANCE = Equation(
    "P_t = A_t P_{t-1} A_tᵀ + ω_t r_t² k_t k_tᵀ",
    r"\mathbf{P}_t = \mathbf{A}_t \mathbf{P}_{t-1} \mathbf{A}_t^\top + \omega_t r_t^2 \mathbf{k}_t \mathbf{k}_t^\top",
)


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


def describe(design: DesignModel) -> Description:
    """The description of a design; see `DesignModel.describe`."""
    return Description(
        title=design.title,
        parts=tuple((heading, equations) for heading, equations in _parts(design) if equations),
        facts=tuple((name, value) for name, value in _facts(design) if value),
    )


def _parts(design: DesignModel) -> list[tuple[str, tuple[Equation, ...]]]:
    if isinstance(design.write, ObserveMemory):
        kept = design.covariance.equations
        return [
            ("memory drifts", (_drift(design), design.transition.matrix)),
            ("a write observes", design.write.density),
            ("predict", (_DRIFT_OF_MEAN, *kept[:1])),
            ("write", (*design.write.update, *kept[1:])),
            ("read", (_READ,)),
        ]
    return [
        ("a write observes", design.write.density),
        ("memory drifts", (design.transition.matrix,)),
        ("predict", (_DRIFT_OF_MEAN,)),
        ("write", (*design.write.update, *((_LATENT_COVARIANCE,) if design.keeps_covariance else ()))),
        ("read", (_READ,)),
    ]


def _drift(design: DesignModel) -> Equation:
    rows = design.transition.process_noise_shape
    return Equation(
        f"S_t | S_{{t-1}} ~ N(A_t S_{{t-1}}, ℓ_t² N),  N = {rows.text}",
        r"\mathbf{S}_t \mid \mathbf{S}_{t-1} \sim \mathcal{N}(\mathbf{A}_t \mathbf{S}_{t-1},\ \ell_t^2 \mathbf{N}),"
        rf"\quad \mathbf{{N}} = {rows.latex}",
    )


def _facts(design: DesignModel) -> list[tuple[str, str]]:
    state = design.state_size(64, 64)
    parameters = "\n".join(f"{p.name} = {p.symbol}, {p.bound}, {p.shape}" for p in design.step_parameters)
    return [
        ("exactness", design.exactness),
        ("state per head", f"{state_formula(design)} elements ({state.total:,} at D = M = 64)"),
        (
            "cost per token",
            f"{design.cost_order} ({design.multiplications(64, 64):,} multiplications at D = M = 64)",
        ),
        ("step parameters", parameters),
        ("note", design.note),
        ("citation", design.citation),
    ]


def state_formula(design: DesignModel) -> str:
    """The state size in the letters of the legend, such as `D·M + D²`."""
    if not design.keeps_covariance:
        return "D·M"
    groups = "" if design.write.groups == 1 else f"{design.write.groups}·"
    return f"D·M + {groups}{'D²' if isinstance(design.covariance, Dense) else 'D'}"
