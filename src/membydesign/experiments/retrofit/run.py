"""Run the retrofit: replace layers of a pretrained Gated DeltaNet by Bayesian Layers that learn from it.

Three models: the teacher (GDN-zero), the hybrid after both phases (BL), and the teacher trained on for the same tokens
(GDN-FT). RULER's needles and perplexity, both by length. The paper: §4.3 and its appendix on distillation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from membydesign.evaluation.niah.haystack import Essays, read_essays
from membydesign.evaluation.niah.scores import by_task, common, mean_of_tasks
from membydesign.evaluation.text import EMBEDDED
from membydesign.experiments.retrofit import evaluation
from membydesign.experiments.retrofit.claims import claims
from membydesign.experiments.retrofit.config import PRESETS, Pretraining, RetrofitConfig
from membydesign.experiments.retrofit.evaluation import ESSAYS, MODELS, NeedlesRun, PerplexityRun, answers_of
from membydesign.experiments.retrofit.figures import plot
from membydesign.experiments.retrofit.tables import notes, tables
from membydesign.experiments.retrofit.training import (
    CONTROL,
    CONTROL_A,
    DRILLS,
    HYBRID,
    PHASE_A,
    PhaseRun,
    PretrainingRun,
    check_teacher,
    replicas,
    work,
)
from membydesign.experiments.shared.niah_tables import difference_metrics, difference_tables
from membydesign.experiments.shared.texts import Part, prepare_parts, prepare_tokenizer, refused, same_texts
from membydesign.files import write_text
from membydesign.reports.record import Outcome
from membydesign.training import Run, processes

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.experiments.shared.run_context import RunContext

__all__ = ["PRESETS", "TITLE", "RetrofitConfig", "plot", "run"]

TITLE = "Retrofit: Bayesian Layers distilled into a pretrained Gated DeltaNet"


def run(config: RetrofitConfig, context: RunContext) -> Outcome:
    """Train or load the teacher, measure it, distil, train the control, and measure the two."""
    replicas(config.distillation)  # raises an error for shards, before anything is trained
    with processes().main_process_first():  # the other processes find all files in place
        _prepare(config, context)
    if isinstance(config.teacher, Pretraining):
        context.stage("pretraining")
        pretraining = PretrainingRun(config.teacher, config.distillation.validation_windows)
        trained = context.sweep([Run(pretraining.name, pretraining, work)], alone=True)
    else:
        trained = {}
    # The paper verifies its checkpoint on held-out text before anything else.
    texts = {text: config.texts.window_tokens.get(text) for text in config.texts.perplexity}
    perplexities = [PerplexityRun(model, config.teacher, config.evaluation.lengths, texts) for model in MODELS]
    teacher, *others = (Run(each.name, each, evaluation.measure_perplexity) for each in perplexities)
    context.stage("the teacher's perplexity")
    measured = context.sweep([teacher])
    trained |= _distil(config, context)
    context.stage("evaluation")
    needles = [NeedlesRun(model, config.teacher, config.evaluation) for model in MODELS]
    measured |= context.sweep([*(Run(each.name, each, evaluation.ask) for each in needles), *others])
    answers = {each.model: answers_of(context.runs / each.name) for each in needles}
    differences = {other: common(answers["bl"], answers[other]) for other in ("gdn_zero", "gdn_ft")}
    metrics = {
        "training": trained,
        "niah": {
            model: {
                str(length): {task: cell.mean for task, cell in tasks.items()} | {"mean": mean_of_tasks(tasks)}
                for length, tasks in by_task(answered).items()
            }
            for model, answered in answers.items()
        },
        "perplexity": {each.model: measured[each.name]["perplexity"] for each in perplexities},
        "differences": {f"bl - {other}": difference_metrics(*both) for other, both in differences.items()},
        "evaluation_seconds": {name: one["seconds"] for name, one in measured.items()},
    }
    shown = [
        replace(table, title=f"BL − {MODELS[other]}. {table.title}")
        for other, both in differences.items()
        for table in difference_tables(*both)
    ]
    return Outcome(
        config,
        claims(config, metrics),
        metrics,
        notes(config, metrics),
        {"differences": differences, "metrics": metrics},
        [*tables(config, metrics, answers), *shown],
        training_share=config.share_of_paper,
    )


def _prepare(config: RetrofitConfig, context: RunContext) -> None:
    """Prepare tokenizer, haystack and token files, and check settings that would otherwise fail hours later."""
    texts, tokenizer = config.texts, config.tokenizer
    assert tokenizer is not None  # as the settings make sure
    with refused():
        essays = _essays(texts.essays, context.data)
    words = prepare_tokenizer(tokenizer, texts.words, context, texts.digits)
    if isinstance(config.teacher, str):
        check_teacher(config.teacher, config.student, words)
    with refused():
        evaluation.check(config, words, essays)
    named = {"train": texts.train, "validation": texts.validation, **texts.perplexity}
    if texts.drills:
        named[DRILLS] = texts.drills
    parts = {name: Part(names, texts.most_tokens.get(name)) for name, names in named.items()}
    folder = prepare_parts(parts, words, context)
    haystack = " ".join(essays.words)
    write_text(folder / ESSAYS, haystack)
    with refused():
        evaluation.check_texts(config, folder)
    same_texts(parts, context, essays=haystack)


def _essays(name: str, data: Path | None) -> Essays:
    if name == EMBEDDED:
        return read_essays(name)
    if data is None:
        raise ValueError(
            f"data: expected the folder that holds {name}, RULER's haystack (mbd reproduce … --data FOLDER), got none; "
            "RULER's scripts/data/synthetic/json/download_paulgraham_essay.py makes it"
        )
    return read_essays(data / name)


def _distil(config: RetrofitConfig, context: RunContext) -> dict[str, dict[str, Any]]:
    """Do both phases and the control; return the metrics of each run by name."""
    metrics: dict[str, dict[str, Any]] = {}
    for stage, names in {"Phase A": (PHASE_A, CONTROL_A), "Phase B": (HYBRID, CONTROL)}.items():
        context.stage(f"{stage}, and the control")
        runs = [PhaseRun(name, config.teacher, config.student, config.distillation) for name in names]
        metrics |= context.sweep([Run(each.name, each, work) for each in runs])
    return metrics
