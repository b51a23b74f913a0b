"""Build the tables and notes of the retrofit's report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from membydesign.evaluation.niah.scores import by_task, mean_of_tasks
from membydesign.experiments.retrofit.claims import has_paper_settings
from membydesign.experiments.retrofit.config import PAPER, Pretraining
from membydesign.experiments.retrofit.evaluation import MODELS
from membydesign.experiments.retrofit.training import CONTROL, CONTROL_A, HYBRID, PHASE_A, PRETRAINED
from membydesign.experiments.shared.niah_tables import short
from membydesign.reports.record import RecordTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from membydesign.evaluation.niah.run import Answered
    from membydesign.experiments.retrofit.config import RetrofitConfig, Student

RUNS = {
    PRETRAINED: "pretraining (GDN-zero)",
    PHASE_A: "Phase A",
    HYBRID: "Phase B (BL)",
    CONTROL_A: "control, tokens of Phase A",
    CONTROL: "control, tokens of Phase B (GDN-FT)",
}


def tables(
    config: RetrofitConfig, metrics: Mapping[str, Any], answers: Mapping[str, Sequence[Answered]]
) -> list[RecordTable]:
    """Build the tables: RULER by task, perplexity, distance of the student from its teacher, and cost."""
    training = metrics["training"]
    return [
        _niah(config, answers),
        *(_perplexity(text, metrics["perplexity"]) for text in config.texts.perplexity),
        _layers(training),
        _cost(training),
    ]


def _niah(config: RetrofitConfig, answers: Mapping[str, Sequence[Answered]]) -> RecordTable:
    scores = {model: by_task(answered) for model, answered in answers.items()}
    rows = []
    for length in config.evaluation.lengths:
        for model, label in MODELS.items():
            cells = scores[model][length]
            by_name = [f"{cells[task].mean:.2f}" for task in config.evaluation.tasks]
            rows.append([f"{length:,}", label, *by_name, f"{mean_of_tasks(cells):.2f}"])
    note = f"{config.evaluation.samples} samples of each task and length, the same for all models."
    headings = ["context", "model", *map(short, config.evaluation.tasks), "mean"]
    return RecordTable("RULER scores, in per cent", headings, rows, note)


def _perplexity(text: str, perplexity: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> RecordTable:
    rows = []
    for i, zero in enumerate(perplexity["gdn_zero"][text]):
        row: list[str] = [f"{zero['length']:,}"]
        for model in MODELS:
            one = perplexity[model][text][i]
            change = 100 * (one["perplexity"] / zero["perplexity"] - 1)
            row += [f"{one['perplexity']:.3f}" + ("" if model == "gdn_zero" else f" ({change:+.2f} %)")]
        rows.append([*row, f"{zero['tokens']:,}", f"{zero['windows']:,}"])
    headings = ["context", *MODELS.values(), "tokens", "windows"]
    return RecordTable(f"Perplexity by length: {text}", headings, rows, "In brackets, the change from GDN-zero.")


def _layers(training: Mapping[str, Mapping[str, Any]]) -> RecordTable:
    rows = []
    layers = ", ".join(next(iter(training[PHASE_A]["validation"].values()))["nmse"])
    for step, measured in training[PHASE_A]["validation"].items():
        shown = [f"{x:.4f}" for x in measured["nmse"].values()]
        rows.append(["Phase A", int(step), " ".join(shown), "—", "—"])
    for step, measured in training[HYBRID]["validation"].items():
        shown = [f"{x:.4f}" for x in measured["nmse"].values()]
        rows.append(
            ["Phase B", int(step), " ".join(shown), f"{measured['kl']:.4f}", f"{measured['cross_entropy']:.4f}"]
        )
    for step, measured in training[CONTROL]["validation"].items():
        rows.append(["GDN-FT", int(step), "—", "—", f"{measured['cross_entropy']:.4f}"])
    note = f"NMSE of layers {layers}, in this order. All on validation text, in nats where they have a unit."
    return RecordTable(
        "How near the student is to its teacher", ["", "step", "NMSE", "KL", "cross-entropy"], rows, note
    )


def _cost(training: Mapping[str, Mapping[str, Any]]) -> RecordTable:
    rows = [
        [
            label,
            f"{training[name]['trained_weights']:,}",
            f"{training[name]['steps']:,}",
            f"{training[name]['tokens']:,}",
            f"{training[name]['seconds']:,.0f}",
            f"{training[name]['training_loss']:.4f}",
        ]
        for name, label in RUNS.items()
        if name in training
    ]
    headings = ["run", "weights trained", "steps", "tokens", "seconds", "training loss"]
    return RecordTable("Training", headings, rows, "Losses of different runs are different things.")


def notes(config: RetrofitConfig, metrics: Mapping[str, Any]) -> list[str]:
    """Return what a reader should know before believing the tables."""
    both, student, training = config.distillation, config.student, metrics["training"]
    tokens, theirs = both.tokens, PAPER.distillation.tokens
    remarks = [
        f"Layers {', '.join(map(str, student.layers))} were replaced. Transition: {student.transition}; convolutions: "
        f"{student.convolution}; start of transition and noises: {student.start}{_as_the_paper(student, 'start')}; "
        f"write noise: {student.write_noise}{_as_the_paper(student, 'write_noise')}. Both phases have "
        f"{tokens:,} tokens, {100 * tokens / theirs:.2g} % of the paper's {theirs:,}, and so has the control: the "
        "paper's text gives it 400M tokens, its table of settings 300M.",
    ]
    if isinstance(config.teacher, Pretraining):
        made = training[PRETRAINED]
        remarks.append(
            f"The teacher is a Gated DeltaNet of {made['weights']:,} weights, trained here on {made['tokens']:,} "
            f"tokens of {', '.join(config.texts.train)}: the paper's has 340M weights and 15B tokens. It has seen "
            "questions of RULER's form at short length, since without them a model of this size answers none: the same "
            "wording, keys of the same lists of words, the same line of noise, other values, and other text around "
            "them. Both phases and the control read the same text again, in another order: the student learns "
            "from its teacher there, the control from the answers themselves."
        )
    elif has_paper_settings(config):
        remarks.append(
            f"The teacher is what {config.teacher} holds. The paper's numbers are compared only if its cross-entropy "
            "on held-out SlimPajama is the paper's, too."
        )
    return remarks


def _as_the_paper(student: Student, name: str) -> str:
    theirs = getattr(PAPER.student, name)
    return "" if getattr(student, name) == theirs else f" (the paper's: {theirs})"
