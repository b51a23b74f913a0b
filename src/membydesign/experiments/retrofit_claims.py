"""What the paper claims of the retrofit, beside what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.evaluation.niah_scores import by_task
from membydesign.experiments.record import About, Bound
from membydesign.experiments.retrofit_settings import PAPER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.evaluation.niah_run import Answered
    from membydesign.experiments.record import Check
    from membydesign.experiments.retrofit_settings import RetrofitConfig

PAPER_NIAH = {
    "gdn_zero": {2048: 49.52, 4096: 31.08, 8192: 16.81, 16384: 7.85},
    "gdn_ft": {2048: 48.46, 4096: 31.58, 8192: 16.06, 16384: 8.36},
    "bl": {2048: 50.81, 4096: 34.02, 8192: 20.00, 16384: 8.81},
}
"""The paper's means over six tasks, by length."""

PAPER_PERPLEXITY = {
    "wikitext-103": {
        "gdn_zero": (15.94, 15.06, 14.57, 14.44),
        "gdn_ft": (15.97, 15.08, 14.59, 14.47),
        "bl": (16.34, 15.46, 14.97, 14.83),
    },
    "slimpajama-heldout": {
        "gdn_zero": (12.61, 12.32, 12.15, 12.06),
        "gdn_ft": (12.62, 12.33, 12.16, 12.07),
        "bl": (12.91, 12.61, 12.43, 12.34),
    },
    "pg19-validation": {
        "gdn_zero": (20.30, 19.64, 19.29, 19.14),
        "gdn_ft": (20.36, 19.70, 19.35, 19.19),
        "bl": (20.83, 20.16, 19.81, 19.65),
    },
}
"""The paper's perplexities at 2,048, 4,096, 8,192 and 16,384 tokens."""

MULTI = ("niah_multivalue", "niah_multiquery")
SENTINEL = 2.535
"""The checkpoint's cross-entropy on SlimPajama's held-out text, which the paper verifies first."""


def claims(
    config: RetrofitConfig, metrics: Mapping[str, Any], answers: Mapping[str, Sequence[Answered]]
) -> list[Check]:
    """The paper's orders and ratios at the preset's lengths; its numbers too, where the teacher is the paper's."""
    found: list[Check] = []
    scores = metrics["niah"]
    claim = "BL finds more needles than GDN-zero at every length"
    for length in config.evaluation.lengths:
        gain = scores["bl"][str(length)] - scores["gdn_zero"][str(length)]
        found.append(Bound(claim, f"BL − GDN-zero at {length:,}, points", "> 0", gain))
    claim = "More training of GDN alone does not bring these gains"
    for length in config.evaluation.lengths:
        gain = scores["bl"][str(length)] - scores["gdn_ft"][str(length)]
        found.append(Bound(claim, f"BL − GDN-FT at {length:,}, points", "> 0", gain))
    found += _multi_target(config, answers)
    found += _perplexity(metrics["perplexity"])
    if config.teacher == PAPER.teacher:
        found += _numbers(metrics)
    return found


def _multi_target(config: RetrofitConfig, answers: Mapping[str, Sequence[Answered]]) -> list[Check]:
    tasks = [task for task in MULTI if task in config.evaluation.tasks]
    ours, theirs = by_task(answers["bl"]), by_task(answers["gdn_zero"])
    claim = "Gains are on multi-target retrieval, at every length"
    return [
        Bound(
            claim,
            f"BL − GDN-zero, {task.removeprefix('niah_')} at {length:,}, points",
            "> 0",
            ours[length][task].mean - theirs[length][task].mean,
        )
        for length in config.evaluation.lengths
        for task in tasks
    ]


def _perplexity(perplexity: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[Check]:
    found: list[Check] = []
    for text, of_zero in perplexity["gdn_zero"].items():
        ratios = {
            model: [a["perplexity"] / b["perplexity"] for a, b in zip(perplexity[model][text], of_zero, strict=True)]
            for model in ("bl", "gdn_ft")
        }
        cost = 100 * (max(ratios["bl"]) - 1)
        found.append(Bound("BL costs at most 2.7 % of perplexity", f"{text}, the most over lengths, %", "≤ 2.7", cost))
        spread = 100 * (max(ratios["bl"]) - min(ratios["bl"]))
        found.append(Bound("The cost is flat in length", f"{text}, spread in points (our reading)", "≤ 0.5", spread))
        drift = 100 * max(abs(ratio - 1) for ratio in ratios["gdn_ft"])
        found.append(Bound("GDN-FT stays within 0.3 % of GDN-zero's perplexity", f"{text}, %", "≤ 0.3", drift))
    return found


def _numbers(metrics: Mapping[str, Any]) -> list[Check]:
    """The paper's own numbers; their tolerances are our reading of what another run of the same may give."""
    found: list[Check] = []
    for model, by_length in PAPER_NIAH.items():
        for length, paper in by_length.items():
            ours = metrics["niah"][model].get(str(length))
            if ours is not None:
                found.append(About("RULER's mean over six tasks", f"{model} at {length:,}", paper, ours, 2.0))
    for text, of_models in PAPER_PERPLEXITY.items():
        for model, printed in of_models.items():
            for paper, ours in zip(printed, metrics["perplexity"][model].get(text, ()), strict=False):
                name = f"{model}, {text} at {ours['length']:,}"
                found.append(About("Perplexity by length", name, paper, ours["perplexity"], 0.01 * paper))
    held_out = metrics["perplexity"]["gdn_zero"].get("slimpajama-heldout")
    if held_out:
        claim = "The checkpoint's cross-entropy on held-out SlimPajama"
        found.append(About(claim, "nats, before distillation", SENTINEL, held_out[0]["cross_entropy"], 0.005))
    return found
