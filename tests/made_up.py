"""A made-up result with every kind of comparison, a table, notes, a figure, and letters that mean more elsewhere."""

import re
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path

from membydesign.reports import record
from membydesign.reports.comparison import About, Bound, Comparison, lowest, rising

TRICKY = 'a < b & c | d, *e* _f_ __g__ `h` [i](j) \\k ~l~ &amp; <b>"m"</b> # n\'s #'
"""All of these are plain text."""

PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
HOLDS, FAILS = "The bounds hold", f"Orders {TRICKY}"
VERDICT = re.compile(r"\bholds?\b|DOES NOT HOLD|\bagrees?\b|\byes\b|\bNO\b|[✓✗]")
"""What a page says about claims that were tested."""
LOSSES = {"Bayesian Layer": 1.5, "KDA": 1.6, "A|B": 1.6002}


@dataclass(frozen=True)
class Config:
    width: int = 16


def outcome(ours: float = 0.43) -> record.Outcome:
    return record.Outcome(
        Config(),
        [
            Comparison(HOLDS, "margin", 0.43, 0.4266, 0.005),
            Comparison(HOLDS, "crossing", "never", "never", 0),
            About(HOLDS, "accuracy (%)", 88, 87.4, 2),
            Bound(HOLDS, "margin at ρ = 0.95", "> 0", ours),
            lowest(HOLDS, "loss at n/D = 16", "Bayesian Layer", LOSSES, margin=0.05),
            rising(FAILS, TRICKY, ["KDA", "Bayesian Layer", "A|B"], LOSSES),
        ],
        {"curve": [1.0, float("nan")]},
        ["Plain `k_B < 1`, **bold** and [a link](https://example.org/?a=1&b=2), 1 < 2.", "A [file](report.md).\nMore."],
        tables=[
            record.RecordTable(
                f"Table {TRICKY}", ["name", "n|m", "loss"], [[TRICKY, 16, 1.23456], ["<i>", 8, float("inf")]], "*Note*."
            )
        ],
        training_share=0.024,
    )


def write(directory: Path, *, figure: str = "loss (a).png", ours: float = 0.43, preset: str = "cpu") -> Path:
    """Write it, and its figure; returns the report."""
    directory.mkdir(parents=True)
    path = directory / figure
    path.write_bytes(PIXEL)
    made = record.Provenance(
        "made-up", preset, f"mbd reproduce '{TRICKY}'", "0123456789abcdef", "today", 1.5, {"x": "1"}
    )
    return record.write(directory, outcome(ours), made, f"Title {TRICKY}", {f"Caption {TRICKY}": path})
