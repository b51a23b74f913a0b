"""Measure the models of the retrofit: RULER's needles and perplexity, both by length."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from membydesign.data.token_files import TokenFile
from membydesign.data.tokenizer import load_tokenizer
from membydesign.evaluation.niah import NIAH
from membydesign.evaluation.niah.haystack import read_essays
from membydesign.evaluation.niah.run import answer, read_answers
from membydesign.evaluation.perplexity import perplexity
from membydesign.experiments.retrofit.training import CONTROL, HYBRID, MODEL, load_model, load_teacher
from membydesign.experiments.shared.niah_tables import scores_metrics
from membydesign.experiments.shared.texts import TOKENIZER
from membydesign.reports.provenance import commit
from membydesign.training import Progress, processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from membydesign.evaluation.niah.haystack import Essays
    from membydesign.evaluation.niah.run import Answered
    from membydesign.experiments.retrofit.config import Evaluation, Pretraining, RetrofitConfig

ESSAYS = "essays.txt"
"""The haystack, next to the token files."""

MODELS = {"gdn_zero": "GDN-zero", "gdn_ft": "GDN-FT", "bl": "BL"}
"""The models that are compared, and what the paper calls them: the teacher, the control, the hybrid."""


@dataclass(frozen=True)
class PerplexityRun:
    """Settings of one model's perplexities.

    Attributes:
        model: a name of `MODELS`.
        teacher: a checkpoint, or how it was trained.
        lengths: of windows.
        texts: names of token files, each with the tokens that its windows are to hold, or None for all.
    """

    model: str
    teacher: str | Pretraining
    lengths: tuple[int, ...]
    texts: dict[str, int | None]

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"perplexity_{self.model}"


@dataclass(frozen=True)
class NeedlesRun:
    """Settings of one model's answers to RULER's questions.

    Attributes:
        model: a name of `MODELS`.
        teacher: a checkpoint, or how it was trained.
        evaluation: what is asked.
    """

    model: str
    teacher: str | Pretraining
    evaluation: Evaluation

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"niah_{self.model}"


def check(config: RetrofitConfig, words: PreTrainedTokenizerBase, essays: Essays) -> None:
    """Raise an error, before anything is trained, if a length is too short for a question."""
    evaluation = config.evaluation
    niah = NIAH(words, essays, evaluation.new_tokens)
    for task in evaluation.tasks:
        for length in evaluation.lengths:
            niah.check_length(task, length, evaluation.samples, evaluation.seed)


def check_texts(config: RetrofitConfig, folder: Path) -> None:
    """Raise an error if a window is longer than a text."""
    for text in config.texts.perplexity:
        for length in config.evaluation.lengths:
            try:
                read(folder, text, length, config.texts.window_tokens.get(text))
            except ValueError as error:
                raise ValueError(f"{text}: {error}") from error


def tokens_of(there: int, length: int, window_tokens: int | None) -> int:
    """Return how many tokens of a text are read: all, or as many as windows need to hold `window_tokens`."""
    return there if window_tokens is None else math.ceil(window_tokens / length) * length


def read(folder: Path, text: str, length: int, window_tokens: int | None) -> Tensor:
    """Read a text from its beginning, [N]: as many tokens as `tokens_of` says."""
    file = TokenFile(folder / f"{text}.safetensors")
    stop = tokens_of(len(file), length, window_tokens)
    if max(stop, length) > len(file):
        raise ValueError(
            f"length: expected at least {max(stop, length):,} tokens for windows of {length:,}, got {len(file):,}"
        )
    return file.read(0, stop)


def measure_perplexity(config: PerplexityRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Measure perplexity by text and length; return the metrics of the run. Several processes share the work."""
    from accelerate.utils import gather_object

    made_by, started, launched = commit(), time.perf_counter(), processes()
    model = _model(config, directory).to(launched.device).eval()
    pairs = [(text, length) for text in config.texts for length in config.lengths]
    mine = pairs[launched.process_index :: launched.num_processes]
    results: list[tuple[str, dict[str, Any]]] = []
    for text, length in mine:
        tokens = read(_data(directory), text, length, config.texts[text])
        results.append((text, perplexity(model, tokens, length).as_dict()))
        watch(Progress(len(results), len(mine), None, len(results) / (time.perf_counter() - started)))
    everything = gather_object(results)
    return {
        "model": config.model,
        "perplexity": {
            name: sorted((one for text, one in everything if text == name), key=lambda one: one["length"])
            for name in config.texts
        },
        "seconds": round(time.perf_counter() - started, 1),
        "commit": made_by,
    }


def ask(config: NeedlesRun, directory: Path, watch: Callable[[Progress], None]) -> dict[str, Any]:
    """Answer RULER's questions; return the metrics of the run. Several processes share the samples."""
    made_by, started, launched, evaluation = commit(), time.perf_counter(), processes(), config.evaluation
    data = _data(directory)
    niah = NIAH(load_tokenizer(data / TOKENIZER), read_essays(data / ESSAYS), evaluation.new_tokens)
    answer(
        _model(config, directory).to(launched.device).eval(),
        niah,
        tasks=evaluation.tasks,
        lengths=evaluation.lengths,
        samples=evaluation.samples,
        seed=evaluation.seed,
        share=(launched.process_index, launched.num_processes),
        file=directory / f"samples-{launched.process_index}.jsonl",
        progress=lambda done, of: watch(Progress(done, of, None, done / (time.perf_counter() - started))),
    )
    launched.wait_for_everyone()
    return {
        "model": config.model,
        "niah": scores_metrics(answers_of(directory)),
        "seconds": round(time.perf_counter() - started, 1),
        "commit": made_by,
    }


def answers_of(directory: Path) -> list[Answered]:
    """Read all answers of a run, sorted by task, length and number."""
    answers = [one for file in sorted(directory.glob("samples-*.jsonl")) for one in read_answers(file)]
    return sorted({one.key: one for one in answers}.values(), key=lambda one: one.key)


def _data(directory: Path) -> Path:
    return directory.parent.parent / "data"


def _model(config: PerplexityRun | NeedlesRun, directory: Path) -> Any:
    if config.model == "gdn_zero":
        return load_teacher(config.teacher, directory.parent)
    return load_model(str(directory.parent / {"gdn_ft": CONTROL, "bl": HYBRID}[config.model] / MODEL))
