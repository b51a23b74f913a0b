"""A page for each claim of the paper that an experiment tests, written from the committed results."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from membydesign.reports import record
from membydesign.reports.comparison import by_claim
from membydesign.reports.page import share
from membydesign.reports.page_markdown import plain
from website import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from membydesign.reports.comparison import Check
    from membydesign.reports.record import Record

FOLDER = "results/claims"


EXPERIMENTS = {
    "collision": ("collision", "nothing is trained"),
    "recall": ("recall", "three seeds"),
    "crowding": ("crowding", "three seeds"),
    "mqar/base": ("mqar", "sequences of 64 tokens, width 128 only"),
    "mqar/update": ("mqar", "sequences of 64 tokens with 4 pairs"),
    "mqar/block": ("mqar", "sequences of 64 tokens instead of 128"),
    "wikitext": ("wikitext", "small models"),
    "retrofit": ("retrofit", "a small world of its own: 4.9 million tokens, 1.4 million weights"),
}
"""The page of docs/results about it and what else differs from the paper, by the folder below results/."""

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
    for folder, (home, _) in EXPERIMENTS.items():
        result = record.read(ROOT / "results" / folder)
        for number, (claim, rows) in enumerate(by_claim(result.comparisons).items(), 1):
            name = f"{folder.replace('/', '-')}-{number}.md"
            written[f"{FOLDER}/{name}"] = page(folder, result, claim, rows)
            verdict = _verdict(result, rows)
            cells = (f"[{_plain(claim)}]({name})", f"[{folder}](../{home}.md)", _training(folder, result), verdict)
            index += f"| {' | '.join(cells)} |\n"
    return {f"{FOLDER}/index.md": index, **written}


def page(folder: str, result: Record, claim: str, rows: Sequence[Check]) -> str:
    """Return the page of one claim: verdict, origin, comparisons and figures."""
    made, home = result.provenance, f"../../../results/{folder}"
    text = f"# {_plain(claim)}\n\n**Verdict: {_verdict(result, rows)}.** {_plain(result.judge.agreeing(rows))}\n\n"
    facts = {
        "experiment": f"[{_plain(result.title)}](../{EXPERIMENTS[folder][0]}.md)",
        "preset": f"`{made.preset}`",
        "share of the paper's training": _training(folder, result),
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


def _training(folder: str, result: Record) -> str:
    """Say how much of the paper's training a result had, and what else was smaller."""
    return "; ".join(filter(None, [share(result.training_share), EXPERIMENTS[folder][1]]))


def _verdict(result: Record, rows: Sequence[Check]) -> str:
    return result.judge.claim(rows).text.lower()


def _plain(text: str) -> str:
    return re.sub(r"\$", r"\\$", plain(text))
