"""A page for each claim of the paper that an experiment tests, written from the committed results."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from membydesign.reports import record
from membydesign.reports.comparison import by_claim
from membydesign.reports.page_markdown import plain
from website import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.reports.comparison import Check
    from membydesign.reports.record import Record

FOLDER = "results/claims"


@dataclass(frozen=True)
class Experiment:
    """What the pages say about an experiment beside its record.

    Attributes:
        page: the page of docs/results about it.
        share: how much of the paper's training its results had.
    """

    page: str
    share: str


EXPERIMENTS = {
    "collision": Experiment("collision", "everything: nothing is trained"),
    "recall": Experiment("recall", "all of it, three seeds"),
    "crowding": Experiment("crowding", "all of it, three seeds"),
    "mqar/base": Experiment("mqar", "2.4 % of the examples, sequences of 64 tokens, width 128 only"),
    "mqar/update": Experiment("mqar", "1.5 % of the examples, 4 pairs"),
    "mqar/block": Experiment("mqar", "8 % of the examples, sequences of 64 tokens instead of 128"),
    "wikitext": Experiment("wikitext", "0.8 % of the tokens, small models"),
    "retrofit": Experiment("retrofit", "a small world of its own: 4.9 million tokens, 1.4 million weights"),
}
"""By the folder below results/."""

INDEX = """\
# Every claim, with its verdict

A page for each claim of the paper that an experiment compares with ours. A claim *holds* if all its comparisons agree
within their tolerances. Verdicts never claim more than the settings that made them: the column "training" says how much
of the paper's training a result had.

| claim | experiment | training | verdict |
|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """Return the table of all claims and a page for each."""
    index, written = INDEX, {}
    for folder, experiment in EXPERIMENTS.items():
        result = record.read(ROOT / "results" / folder)
        for number, (claim, rows) in enumerate(by_claim(result.comparisons).items(), 1):
            name = f"{folder.replace('/', '-')}-{number}.md"
            written[f"{FOLDER}/{name}"] = page(folder, experiment, result, claim, rows)
            verdict = _verdict(result, rows)
            cells = (f"[{_plain(claim)}]({name})", f"[{folder}](../{experiment.page}.md)", experiment.share, verdict)
            index += f"| {' | '.join(cells)} |\n"
    return {f"{FOLDER}/index.md": index, **written}


def page(folder: str, experiment: Experiment, result: Record, claim: str, rows: Sequence[Check]) -> str:
    """Return the page of one claim: verdict, origin, comparisons and figures."""
    made, home = result.provenance, f"../../../results/{folder}"
    text = f"# {_plain(claim)}\n\n**Verdict: {_verdict(result, rows)}.** {_plain(result.judge.agreeing(rows))}\n\n"
    facts = {
        "experiment": f"[{_plain(result.title)}](../{experiment.page}.md)",
        "preset": f"`{made.preset}`",
        "the paper's training": experiment.share,
        "command": f"`{made.command}`",
        "commit": f"`{made.commit[:12]}`",
        "made with": ", ".join(f"{name} {version}" for name, version in made.versions.items()),
        "all numbers": f"[report]({home}/report.md), [metrics.json]({home}/metrics.json)",
    }
    text += "| origin | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    text += "\n## Comparisons\n\n| quantity | paper | ours | tolerance | agrees |\n|---|---|---|---|---|\n"
    for row in rows:
        cells = [row.quantity, *row.shown(), result.judge.row(row).text.lower()]
        text += f"| {' | '.join(map(_plain, cells))} |\n"
    figures = [(caption, path) for caption, path in result.figures.items() if path.is_file()]
    if figures:
        text += "\n## Figures\n"
    for caption, path in figures:
        text += f"\n![{_plain(caption)}]({home}/{path.name})\n\n*{_plain(caption)}*\n"
    return text


def _verdict(result: Record, rows: Sequence[Check]) -> str:
    return result.judge.claim(rows).text.lower()


def _plain(text: str) -> str:
    return re.sub(r"\$", r"\\$", plain(text))
