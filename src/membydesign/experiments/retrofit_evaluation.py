"""How the models of the retrofit are measured: RULER's needles and perplexity, both by length."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from membydesign.data.token_files import TokenFile
from membydesign.data.tokenizer import load_tokenizer
from membydesign.evaluation.niah import NIAH
from membydesign.evaluation.niah_haystack import read_essays
from membydesign.evaluation.niah_run import answer, read_answers
from membydesign.evaluation.perplexity import perplexity
from membydesign.experiments.niah_tables import scores_metrics
from membydesign.experiments.record import commit
from membydesign.experiments.retrofit_runs import CONTROL, HYBRID, MODEL, load_model, load_teacher
from membydesign.experiments.texts import TOKENIZER
from membydesign.training import Progress, processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from membydesign.evaluation.niah_run import Answered
    from membydesign.experiments.retrofit_settings import Evaluation, Pretraining

ESSAYS = "essays.txt"
"""The haystack, beside the token files."""

MODELS = {"gdn_zero": "GDN-zero", "gdn_ft": "GDN-FT", "bl": "BL"}
"""The models that are compared, and what the paper calls them: the teacher, the control, the hybrid."""


@dataclass(frozen=True)
class EvaluationRun:
    """Settings of one model's measurements.

    Attributes:
        model: a name of `MODELS`.
        teacher: a checkpoint, or how it was trained.
        evaluation: what is measured.
        texts: for perplexity, the names of their token files.
    """

    model: str
    teacher: str | Pretraining
    evaluation: Evaluation
    texts: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"evaluation_{self.model}"


def work(config: EvaluationRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Measure; the metrics of the run. Several processes share RULER's samples."""
    made_by, started, data = commit(), time.perf_counter(), directory.parent.parent / "data"
    launched = processes()
    if config.model == "gdn_zero":
        model = load_teacher(config.teacher, directory.parent)
    else:
        model = load_model(str(directory.parent / {"gdn_ft": CONTROL, "bl": HYBRID}[config.model] / MODEL))
    device: Any = launched.device
    model = model.to(device).eval()
    asked = config.evaluation
    found = {
        text: [perplexity(model, _tokens(data, text), length).as_dict() for length in asked.lengths]
        for text in config.texts
    }
    niah = NIAH(load_tokenizer(data / TOKENIZER), read_essays(data / ESSAYS), asked.new_tokens)
    answer(
        model,
        niah,
        tasks=asked.tasks,
        lengths=asked.lengths,
        samples=asked.samples,
        seed=asked.seed,
        share=(launched.process_index, launched.num_processes),
        file=directory / f"samples-{launched.process_index}.jsonl",
        progress=lambda done, of: watch(Progress(done, of, None, done / (time.perf_counter() - started))),
    )
    launched.wait_for_everyone()
    return {
        "model": config.model,
        "perplexity": found,
        "niah": scores_metrics(answers_of(directory)),
        "seconds": round(time.perf_counter() - started, 1),
        "commit": made_by,
    }


def answers_of(directory: Path) -> list[Answered]:
    """All answers of a run, in the order of their tasks, lengths and numbers."""
    found = [one for file in sorted(directory.glob("samples-*.jsonl")) for one in read_answers(file)]
    return sorted({one.key: one for one in found}.values(), key=lambda one: one.key)


def _tokens(data: Path, text: str) -> Any:
    file = TokenFile(data / f"{text}.safetensors")
    return file.read(0, len(file))
