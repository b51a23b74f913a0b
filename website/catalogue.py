"""A page for each design of the catalogue, written from the design itself, and a table of them all."""

from __future__ import annotations

import re

from membydesign.cli.catalogue import HEADINGS, LETTERS, table_rows
from membydesign.design import Design, catalogue
from membydesign.filter.kernels import why_not_each, why_not_each_step
from website.when import WHEN

FOLDER = "reference/catalogue"

GROUPS = {
    "Bayesian Layers and their ablations": ("bayesian_layer", "bayesian_layer_diagonal", "covariance_reset"),
    "Other drifts, covariances and writes": (
        "stationary_bayesian_layer",
        "partial_reset",
        "discounted",
        "unknown_scale",
        "robust_writes",
        "block_diagonal",
        "low_rank",
    ),
    "Rows of the paper's Table 1": (
        "deltanet",
        "gated_deltanet",
        "kda",
        "longhorn",
        "linear_attention",
        "retnet",
        "gla",
        "mamba2",
    ),
    "Beliefs that are not Gaussian": ("count_memory", "categorical_memory", "hidden_markov"),
}
"""The designs by group; all others are relatives, which others published."""

INDEX = """\
# The catalogue

Every row of the paper's Table 1, its ablations, and designs beyond them. `membydesign.catalogue["kda"]` is a design
like any other; `mbd catalogue` prints this table, and `mbd catalogue kda` the equations of one. A
[layer](../../howto/layers.md) and a [model](../../howto/models.md) take the same names.

"Exactness" says how the belief relates to conditioning the joint Gaussian of all memories and writes: an *exact filter*
equals it, any other word names the approximation. D is the key size, M the value size.
[Choose a memory](../../howto/choose-a-memory.md) compares them on tasks.
"""


def pages() -> dict[str, str]:
    """Return the index and a page for each design."""
    return {f"{FOLDER}/index.md": index(), **{f"{FOLDER}/{name}.md": page(name) for name in catalogue}}


def index() -> str:
    """Return the table of all designs, by group."""
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "Relatives": tuple(name for name in catalogue if name not in grouped)}
    rows = dict(zip(catalogue, table_rows(), strict=True))
    text = INDEX
    for title, names in groups.items():
        text += f"\n## {title}\n\n{_row(HEADINGS)}{_row(['---'] * len(HEADINGS))}"
        for name in names:
            transition, write, covariance, exactness, state = rows[name][1:]
            parts = [f"`{part}`" for part in (transition, write, covariance)]
            text += _row([f"[`{name}`]({name}.md)", *parts, exactness, state])
        if title == "Relatives":
            text += "\n[Relatives](../../concepts/relatives.md) says what each assumes and what it throws away.\n"
        if title.startswith("Beliefs"):
            text += '\nTheir column "covariance" names the belief.\n'
    return text


def page(name: str) -> str:
    """Return the page of one design."""
    design = catalogue[name]
    facts = dict(design.describe().facts)
    text = f"# {name}\n\n**{design.title}.** {WHEN[name]}\n\n"
    text += f"## Equations\n\n$$\n{design.describe().latex}\n$$\n\n{LETTERS}\n"
    if design.note:
        text += f"\n{_sentence(design.note)}\n"
    text += f"\n## At a glance\n\n{_row(['property', 'value'])}{_row(['---', '---'])}"
    for fact in ("exactness", "state per head", "cost per token"):
        if fact in facts:
            text += _row([fact, facts[fact]])
    text += _row(["kernels on a CPU", _kernels(why_not_each(design))])
    text += _row(["decoding on a CPU", _kernels(why_not_each_step(design))])
    text += f"\n## Step parameters\n\n{_parameters(design)}\n## Use it\n\n{_use(name, design)}"
    if design.citation:
        text += f"\n## Source\n\n{_sentence(design.citation)}\n"
    return text


def _kernels(reasons: dict[str, str | None]) -> str:
    """Return the kernels that run a design, in order of preference."""
    return "; ".join(kernel for kernel, reason in reasons.items() if reason is None)


def _parameters(design: Design) -> str:
    if not design.step_parameters:
        return "None.\n"
    rows = [[f"`{p.name}`", p.symbol, f"`{p.bound}`", f"`{p.shape}`"] for p in design.step_parameters]
    return "".join(map(_row, [["name", "symbol", "bound", "shape, or one number"], ["---"] * 4, *rows]))


def _use(name: str, design: Design) -> str:
    arguments = ", ".join(f"{p.name}=…" for p in design.step_parameters)
    return (
        "```py\nimport membydesign as mbd\n\n"
        f'design = mbd.catalogue["{name}"]\n'
        f"out = mbd.filter_sequence(design, q, k, v, {arguments})\n"
        f'layer = mbd.make_layer("{name}", hidden_size=64, num_heads=2, head_dim=16)\n```\n'
        f"\n`mbd catalogue {name} --kernels` says why each other kernel does not run it; on a GPU others do\n"
        "([GPU kernels](../../internals/gpu.md)).\n"
    )


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells) + " |\n"


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    text = text if text.endswith(".") else text + "."
    return re.sub(r"([*<])|(?<=\w)_(?=[a-zA-Z]+\()", lambda special: "\\" + special[0], text)
