"""`mbd catalogue`: the designs, in a table or one by one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from membydesign.cli.catalogue_page import catalogue_page
from membydesign.cli.completion import designs
from membydesign.cli.say import AsJson, expect_one_of, fail
from membydesign.cli.tables import Column, Group, show_facts, show_table
from membydesign.design import catalogue as rows
from membydesign.design import state_formula
from membydesign.files import to_json

COLUMNS = (
    Column("name"),
    Column("memory drifts"),
    Column("a write observes"),
    Column("covariance"),
    Column("exactness", spare=2),
    Column("state per head", spare=1),
)


def catalogue(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A design to describe in full, for example kda.", autocompletion=designs),
    ] = None,
    latex: Annotated[bool, typer.Option("--latex", metavar="", help="Print the equations of NAME as LaTeX.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", metavar="", help="Print all designs as one Markdown page.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the designs: what each assumes, how exact it is and how large its state.

    For example: `mbd catalogue`, and `mbd catalogue kda` for the equations of one.

    The designs are the rows of the paper's Table 1 and its ablations. In Python, `membydesign.catalogue["kda"]` is one.
    """
    if name is not None:
        if markdown:
            raise fail("--markdown: expected no NAME with it, since the page has every design: omit NAME")
        expect_one_of("NAME", rows, name)
        description = rows[name].describe()
        if as_json:
            print(to_json(_facts(name)), end="")
        elif latex:
            print(description.latex)
        else:
            equations = [(heading, [each.text for each in some]) for heading, some in description.parts]
            show_facts(description.title, [*equations, *((fact, text.split("\n")) for fact, text in description.facts)])
        return
    if latex:
        raise fail("--latex: expected the NAME of a design with it, for example: mbd catalogue kda --latex")
    if as_json:
        print(to_json([_facts(name) for name in rows]), end="")
    elif markdown:
        print(catalogue_page(), end="")
    else:
        cells = [
            [
                name,
                *(type(part).__name__ for part in (design.transition, design.write, design.covariance)),
                design.exactness,
                state_formula(design),
            ]
            for name, design in rows.items()
        ]
        show_table(
            COLUMNS,
            [Group(cells)],
            title="The catalogue: Table 1 and the ablations",
            caption="D key size, M value size. mbd catalogue NAME shows the equations of one.",
        )


def _facts(name: str) -> dict[str, Any]:
    design = rows[name]
    return {
        "name": name,
        "title": design.title,
        "transition": type(design.transition).__name__,
        "write": type(design.write).__name__,
        "covariance": type(design.covariance).__name__,
        "exactness": design.exactness,
        "state": state_formula(design),
        "cost_per_token": design.cost_order,
        "step_parameters": [asdict(parameter) for parameter in design.step_parameters],
        "latex": design.describe().latex,
        "note": design.note,
        "citation": design.citation,
    }
