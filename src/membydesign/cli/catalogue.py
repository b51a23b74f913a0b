"""`mbd catalogue`: list the designs, describe one, or print them all as Markdown."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from membydesign.cli.completion import designs
from membydesign.cli.output import AsJson, expect_one_of, fail
from membydesign.cli.tables import Column, Group, show_facts, show_table
from membydesign.design import catalogue as rows
from membydesign.files import to_json
from membydesign.filter.kernels import onnx_operator, why_not_each, why_not_each_step

COLUMNS = (
    Column("name"),
    Column("memory drifts"),
    Column("a write observes"),
    Column("covariance"),
    Column("exactness", spare=2),
    Column("state per head", spare=1),
)

HEADINGS = tuple(column.heading for column in COLUMNS)

LETTERS = (
    "D key size, M value size, G noise groups; $\\mathbf{M}_t$ mean, $\\mathbf{P}_t$ covariance, $\\mathbf{A}_t$ "
    "transition, $\\ell_t^2$ process noise, $r_t^2$ write noise, $\\lambda_t$ prior variance."
)
"""The letters of the equations, in Markdown."""


def catalogue(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A design to describe in full, for example kda.", autocompletion=designs),
    ] = None,
    latex: Annotated[bool, typer.Option("--latex", metavar="", help="Print the equations of NAME as LaTeX.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", metavar="", help="Print all designs as one Markdown page.")
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", metavar="", help="Also say why each kernel that does not run NAME does not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the designs: what each assumes, how exact it is and how large its state.

    For example: `mbd catalogue`, and `mbd catalogue kda` for the equations of one.

    The designs are the rows of the paper's Table 1, its ablations, and designs beyond them.
    In Python, `membydesign.catalogue["kda"]` is one.
    """
    if name is not None:
        if markdown:
            raise fail("--markdown: expected no NAME with it, since the page has every design: omit NAME")
        expect_one_of("NAME", rows, name)
        description = rows[name].describe()
        if as_json:
            print(to_json(_as_dict(name)), end="")
        elif latex:
            print(description.latex)
        else:
            equations = [(heading, [each.text for each in some]) for heading, some in description.parts]
            facts = [(fact, text.split("\n")) for fact, text in description.facts]
            show_facts(description.title, [*equations, *facts, *_kernels(name, reasons=kernels)])
        return
    if kernels:
        raise fail("--kernels: expected the NAME of a design with it, for example: mbd catalogue kda --kernels")
    if latex:
        raise fail("--latex: expected the NAME of a design with it, for example: mbd catalogue kda --latex")
    if as_json:
        print(to_json([_as_dict(name) for name in rows]), end="")
    elif markdown:
        print(catalogue_page(), end="")
    else:
        cells = [list(row) for row in table_rows()]
        show_table(
            COLUMNS,
            [Group(cells)],
            title="The catalogue: Table 1, the ablations, and beyond",
            caption="D key size, M value size. mbd catalogue NAME shows the equations of one.",
        )


def _kernels(name: str, *, reasons: bool) -> list[tuple[str, list[str]]]:
    """The kernels that run a design on a CPU, in order of preference, and with `reasons` why the others do not."""
    sequences, steps = why_not_each(rows[name]), why_not_each_step(rows[name])
    runs = [kernel for kernel, reason in sequences.items() if reason is None]
    decodes = [kernel for kernel, reason in steps.items() if reason is None]
    onnx = onnx_operator(rows[name])
    exported = ("ONNX", [onnx.operator or f"cannot be exported: {onnx.reason}"])
    if not reasons:
        decodes.append("(--kernels says why the others do not run it)")
        return [("kernels", runs), ("decoding", decodes), exported]
    others = [f"{kernel}: {reason}" for kernel, reason in {**sequences, **steps}.items() if reason]
    return [("kernels", runs), ("decoding", decodes), exported, ("not", others)]


def _as_dict(name: str) -> dict[str, Any]:
    design = rows[name]
    cost = design.cost(64, 64)
    return {
        "name": name,
        "title": design.title,
        **dict(zip(("transition", "write", "covariance"), design.assumptions(), strict=True)),
        "exactness": design.exactness,
        "state": design.state_formula(),
        "cost_per_token": cost[0] if cost else "",
        "step_parameters": [asdict(parameter) for parameter in design.step_parameters],
        "kernels": why_not_each(design),
        "decoding": why_not_each_step(design),
        "onnx": onnx_operator(design)._asdict(),
        "latex": design.describe().latex,
        "note": design.note,
        "citation": design.citation,
    }


def table_rows() -> list[tuple[str, ...]]:
    """Return the cells of every design: name, assumptions, exactness and state per head."""
    return [(name, *design.assumptions(), design.exactness, design.state_formula()) for name, design in rows.items()]


def catalogue_page() -> str:
    """Return all designs as one Markdown page, written from the designs themselves."""
    cells = [f"| [{name}](#{name}) | {' | '.join(others)} |" for name, *others in table_rows()]
    table = "\n".join([f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS), *cells])
    sections = []
    for name, design in rows.items():
        description = design.describe()
        facts = "\n".join(f"- **{fact}**: {'; '.join(value.splitlines())}" for fact, value in description.facts)
        sections.append(f"## {name}\n\n{description.title}\n\n$$\n{description.latex}\n$$\n\n{facts}\n")
    return f"# The catalogue\n\n{LETTERS}\n\n{table}\n\n" + "\n".join(sections)
