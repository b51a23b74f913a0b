"""`mbd evaluate perplexity`: measure the perplexity of a text by context length."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from membydesign.cli.evaluate.results import (
    LENGTHS,
    BatchSize,
    Lengths,
    Resume,
    load,
    options_named,
    parse_lengths,
    progress_bar,
    result_folder,
    show_result,
    write_result,
    write_settings,
)
from membydesign.cli.loading import Device, Dtype, Model, Tokenizer  # noqa: TC001 - typer reads them
from membydesign.cli.output import AsJson, fail
from membydesign.cli.requirements import need_models
from membydesign.evaluation.text import EMBEDDED
from membydesign.files import read_object
from membydesign.reports import record

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PerplexitySettings:
    """The options that a result is stored with; those in `fixed` cannot change when a run resumes."""

    model: str
    tokenizer: str
    dtype: str
    text: str
    tokens: int
    tokens_fingerprint: str
    lengths: list[int]

    fixed: ClassVar = ("model", "tokenizer", "dtype", "tokens", "tokens_fingerprint")


def perplexity(
    model: Model,
    text: Annotated[
        str,
        typer.Option(metavar="SOURCE", help="Text to read: embedded, a file, a folder, or hub:DATASET:CONFIG:SPLIT."),
    ] = EMBEDDED,
    lengths: Lengths = LENGTHS,
    tokens: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Read only the first N tokens of the text.")
    ] = None,
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the results. Default: runs/perplexity-MODEL.")
    ] = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a text by context length.

    For example: `mbd evaluate perplexity my-model --text books/ --lengths 512,2048`

    Documents (files, or objects of JSON) are joined as in training, each after a BOS token. The stream is cut into
    adjacent windows of L tokens, at the same places for every model with this tokenizer. The model predicts all tokens
    of a window but the first, BOS tokens included. Logits are computed in pieces, so that long windows need little
    memory. `--resume` skips finished lengths.
    """
    need_models("evaluate perplexity")
    from membydesign.evaluation import perplexity as measure
    from membydesign.evaluation.text import read_stream, text_at

    context_lengths, title = parse_lengths(lengths), f"Perplexity by context length: {Path(model).name}"
    out = result_folder(out, "perplexity", model, resume, "metrics.json")
    with options_named({"text": "--text", "length": "--lengths", "tokenizer": "--tokenizer"}):
        text_at(text)
        lm, model_tokenizer, model_dtype = load(model, tokenizer, dtype, device)
        stream = read_stream(text, model_tokenizer, tokens)
        for length in context_lengths:
            measure.windows_of(stream, length)
        settings = PerplexitySettings(
            model, tokenizer or model, model_dtype, text, len(stream), fingerprint_of(stream), context_lengths
        )
        resuming = resume and (out / "metrics.json").exists()
        write_settings(out, settings, "perplexity", resuming)
        done: dict[str, Any] = metrics_of(out)["by_length"] if resuming else {}
        started = time.perf_counter()
        for length in [each for each in context_lengths if str(each) not in done]:
            with progress_bar(f"windows of {length:,}") as progress:
                result = measure.perplexity(lm, stream, length, batch_size=batch_size, progress=progress)
            done = dict(sorted({**done, str(length): result.as_dict()}.items(), key=lambda item: int(item[0])))
            outcome = record.Outcome(settings, [], {"by_length": done}, tables=[_table(title, done)])
            write_result(out, outcome, "perplexity", started, title)
    show_result(out, as_json)


def fingerprint_of(tokens: Tensor) -> str:
    """Hash a stream of tokens."""
    digest = hashlib.sha256()
    for some in tokens.split(2**16):
        digest.update(",".join(map(str, some.tolist())).encode() + b",")
    return digest.hexdigest()[:16]


def metrics_of(out: Path) -> dict[str, Any]:
    """Read the metrics of an earlier result."""
    try:
        return read_object(out / "metrics.json")["metrics"]
    except (OSError, ValueError, KeyError) as error:
        raise fail(f"--resume: expected a result in {out / 'metrics.json'}, got an error: {error!r}") from None


def _table(title: str, done: dict[str, Any]) -> record.RecordTable:
    headings = ["context", "perplexity", "cross-entropy", "tokens", "windows"]
    rows = [
        [
            f"{one['length']:,}",
            f"{one['perplexity']:.3f}",
            f"{one['cross_entropy']:.4f}",
            f"{one['tokens']:,}",
            f"{one['windows']:,}",
        ]
        for one in done.values()
    ]
    return record.RecordTable(title, headings, rows, "Cross-entropy in nats for each predicted token.")
