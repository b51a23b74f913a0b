"""The retrofit: some layers of a pretrained Gated DeltaNet become Bayesian Layers and learn from it. Is that a gain?

Three models: the teacher (GDN-zero), the hybrid after both phases (BL), and the teacher trained on for the same tokens
(GDN-FT). RULER's needles and perplexity, both by length. The paper: §4.3 and its appendix on distillation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from membydesign.data.token_files import TokenFile
from membydesign.evaluation.niah_haystack import EMBEDDED, read_essays
from membydesign.evaluation.niah_scores import by_task, common, mean_of_tasks
from membydesign.experiments import retrofit_evaluation as evaluation
from membydesign.experiments.niah_tables import difference_metrics, difference_tables
from membydesign.experiments.record import Outcome
from membydesign.experiments.retrofit_claims import claims
from membydesign.experiments.retrofit_evaluation import ESSAYS, MODELS, EvaluationRun, answers_of
from membydesign.experiments.retrofit_figures import plot
from membydesign.experiments.retrofit_runs import (
    CONTROL,
    CONTROL_A,
    HYBRID,
    PHASE_A,
    PhaseRun,
    PretrainingRun,
    check_teacher,
    work,
)
from membydesign.experiments.retrofit_settings import PRESETS, Pretraining, RetrofitConfig
from membydesign.experiments.retrofit_tables import notes, tables
from membydesign.experiments.texts import Part, TextsError, prepare_parts
from membydesign.files import write_text
from membydesign.training import Run, processes

if TYPE_CHECKING:
    from pathlib import Path

    from membydesign.experiments.workspace import Workspace

__all__ = ["PRESETS", "TITLE", "RetrofitConfig", "plot", "run"]

TITLE = "Retrofit: Bayesian Layers distilled into a pretrained Gated DeltaNet"


def run(config: RetrofitConfig, workspace: Workspace) -> Outcome:
    """Train or load the teacher, distil, train the control, and measure all three."""
    with processes().main_process_first():  # the others find everything made
        folder = _prepare(config, workspace)
    if isinstance(config.teacher, str):
        check_teacher(config.teacher, config.student, TokenFile(folder / "train.safetensors"))
    made = _train(config, workspace)
    workspace.stage("evaluation")
    measured = [
        EvaluationRun(model, config.teacher, config.evaluation, tuple(config.texts.perplexity)) for model in MODELS
    ]
    found = workspace.sweep([Run(each.name, each, evaluation.work) for each in measured])
    answers = {each.model: answers_of(workspace.runs / each.name) for each in measured}
    differences = {other: common(answers["bl"], answers[other]) for other in ("gdn_zero", "gdn_ft")}
    metrics = {
        "training": made,
        "niah": {
            model: {str(length): mean_of_tasks(tasks) for length, tasks in by_task(answered).items()}
            for model, answered in answers.items()
        },
        "perplexity": {each.model: found[each.name]["perplexity"] for each in measured},
        "differences": {f"bl - {other}": difference_metrics(*both) for other, both in differences.items()},
        "evaluation_seconds": {each.model: found[each.name]["seconds"] for each in measured},
    }
    shown = [
        replace(table, title=f"BL − {MODELS[other]}. {table.title}")
        for other, both in differences.items()
        for table in difference_tables(*both)
    ]
    return Outcome(
        config,
        claims(config, metrics, answers),
        metrics,
        notes(config, metrics),
        {"differences": differences, "metrics": metrics},
        [*tables(config, metrics, answers), *shown],
    )


def _prepare(config: RetrofitConfig, workspace: Workspace) -> Path:
    """Tokenizer, token files and haystack; returns their folder."""
    texts = config.texts
    named = {"train": texts.train, "validation": texts.validation, **texts.perplexity}
    parts = {name: Part(names, texts.most_tokens.get(name)) for name, names in named.items()}
    folder = prepare_parts(parts, texts.tokenizer, texts.words, workspace)
    try:
        if texts.essays != EMBEDDED and workspace.data is None:
            raise ValueError(f"data: expected the folder that holds {texts.essays} (--data FOLDER), got none")
        essays = read_essays(texts.essays if texts.essays == EMBEDDED else workspace.data / texts.essays)  # pyright: ignore
    except (ValueError, OSError) as error:
        raise TextsError(str(error)) from error
    write_text(folder / ESSAYS, " ".join(essays.words))
    return folder


def _train(config: RetrofitConfig, workspace: Workspace) -> dict[str, dict[str, Any]]:
    """All training runs; what each came to, by name."""
    found: dict[str, dict[str, Any]] = {}
    if isinstance(config.teacher, Pretraining):
        workspace.stage("pretraining")
        pretraining = PretrainingRun(config.teacher, config.distillation.validation_windows)
        found |= workspace.sweep([Run(pretraining.name, pretraining, work)], alone=True)
    for stage, names in {"Phase A": (PHASE_A, CONTROL_A), "Phase B": (HYBRID, CONTROL)}.items():
        workspace.stage(f"{stage}, and the control")
        runs = [PhaseRun(name, config.teacher, config.student, config.distillation) for name in names]
        found |= workspace.sweep([Run(each.name, each, work) for each in runs])
    return found
