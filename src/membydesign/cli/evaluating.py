"""What the commands of `mbd evaluate` share: options, settings that results are kept with, and how they are shown."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from membydesign.cli.loading import is_folder, load_model, load_tokenizer, quiet, usable_device
from membydesign.cli.say import console, dtype_of, fail
from membydesign.cli.stopping import resumable
from membydesign.cli.tables import Column, Group, show_table
from membydesign.errors import did_you_mean
from membydesign.evaluation.niah import TASKS
from membydesign.experiments import record
from membydesign.files import to_json, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from membydesign.evaluation.niah_run import Answered

ANSWERS = "samples.jsonl"
LENGTHS = "2048,4096,8192,16384"

Lengths = Annotated[str, typer.Option(metavar="N,N,…", help="Context lengths in tokens, separated by commas.")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Sequences per batch. Default: as many as make 16,384 tokens.")
]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Keep finished work in the folder and do the rest.")]


@dataclass(frozen=True)
class NiahSettings:
    """What `mbd evaluate niah` was asked for; `settled` are what cannot change when it goes on."""

    model: str
    tokenizer: str
    dtype: str
    essays: str
    essays_fingerprint: str
    new_tokens: int
    seed: int
    tasks: list[str]
    lengths: list[int]
    samples: int

    settled: ClassVar = ("model", "tokenizer", "dtype", "essays_fingerprint", "new_tokens", "seed")


@dataclass(frozen=True)
class PerplexitySettings:
    """What `mbd evaluate perplexity` was asked for; `settled` are what cannot change when it goes on."""

    model: str
    tokenizer: str
    dtype: str
    text: str
    tokens: int
    tokens_fingerprint: str
    lengths: list[int]

    settled: ClassVar = ("model", "tokenizer", "dtype", "tokens", "tokens_fingerprint")


# What is given


def named_tasks(words: str) -> list[str]:
    """Tasks as a user names them, with commas and with or without `niah_`; in RULER's order."""
    names = [word if word.startswith("niah_") else f"niah_{word}" for word in _words(words)]
    if names == ["niah_all"]:
        return list(TASKS)
    for name in names:
        if name not in TASKS:
            near = did_you_mean(name, TASKS)
            raise fail(
                f"--tasks: expected some of {', '.join(TASKS)}, or all, got {name.removeprefix('niah_')!r}{near}"
            )
    if not names:
        raise fail(f"--tasks: expected some of {', '.join(TASKS)}, or all, got none")
    return [name for name in TASKS if name in names]


def named_lengths(words: str) -> list[int]:
    """Lengths as a user writes them, with commas; the shortest first."""
    try:
        numbers = sorted({int(word) for word in _words(words)})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 2:
        raise fail(f"--lengths: expected whole numbers of at least 2 with commas, such as 2048,4096, got {words!r}")
    return numbers


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def result_folder(out: Path | None, what: str, model: str, resume: bool, file: str) -> Path:
    """Where results go; refused if there are some that are not to be kept."""
    name = Path(model).resolve().name if is_folder(model) else Path(model).name
    out = Path("runs") / f"{what}-{name}" if out is None else out
    if out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    if not resume and (out / file).exists():
        raise fail(f"--out: {out} holds results; go on with them with --resume, or name another folder")
    return out


def loaded(model: str, tokenizer: str | None, dtype: str | None, device: str | None) -> tuple[Any, Any, str]:
    """The model, its tokenizer, and the type of its numbers."""
    quiet()
    words = load_tokenizer(tokenizer or model)
    lm = load_model(model, dtype_of(dtype), usable_device(device))
    return lm, words, str(lm.dtype).removeprefix("torch.")


def fingerprint_of(tokens: Tensor) -> str:
    """A hash of a stream of tokens."""
    digest = hashlib.sha256()
    for some in tokens.split(2**16):
        digest.update(",".join(map(str, some.tolist())).encode() + b",")
    return digest.hexdigest()[:16]


def settle(out: Path, settings: NiahSettings | PerplexitySettings, preset: str, going_on: bool) -> None:
    """Write the settings down; refused if what is done already was done with others."""
    now, file = asdict(settings), out / "config.json"
    if going_on:
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise fail(f"--resume: expected the settings of what is done in {file}, got an error: {error}") from None
        for name in settings.settled:
            if before.get(name) != now[name]:
                raise fail(f"--resume: expected {name} as in {file}, {before.get(name)!r}, got {now[name]!r}")
    out.mkdir(parents=True, exist_ok=True)
    write_text(file, to_json({"preset": preset, **now}))


def metrics_of(out: Path) -> dict[str, Any]:
    """What a result of before holds."""
    try:
        return json.loads((out / "metrics.json").read_text(encoding="utf-8"))["metrics"]
    except (OSError, ValueError, KeyError) as error:
        raise fail(f"--resume: expected a result in {out / 'metrics.json'}, got an error: {error!r}") from None


def answers_in(source: Path) -> list[Answered]:
    """What `mbd evaluate niah` left in a folder."""
    from membydesign.evaluation.niah_run import read_answers

    file = source / ANSWERS if source.is_dir() else source
    if not file.is_file():
        raise fail(f"expected a folder with {ANSWERS}, as mbd evaluate niah writes it, got {str(source)!r}")
    return read_answers(file)


@contextmanager
def options_named(options: Mapping[str, str]) -> Iterator[None]:
    """Errors that name one of these arguments become refusals that name the option."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        if name not in options:
            raise
        raise fail(f"{options[name]}:{rest}") from None


# What is shown


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, and the function that moves it; what is stopped in here can be resumed."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with resumable(), Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def write_result(
    out: Path,
    outcome: record.Outcome,
    what: str,
    started: float,
    title: str,
    figures: dict[str, Path] | None = None,
) -> None:
    """Write config.json, metrics.json and report.md."""
    made = record.Provenance.now(f"evaluate {what}", what, time.perf_counter() - started)
    record.write(out, outcome, made, title, figures or {})


def show_result(out: Path, as_json: bool) -> None:
    """Print what a folder holds."""
    if as_json:
        print((out / "metrics.json").read_text(encoding="utf-8"), end="")
        return
    for each in record.read(out).tables:
        columns = [Column(heading, right=i > 0) for i, heading in enumerate(each.headings)]
        show_table(columns, [Group([list(map(str, row)) for row in each.rows])], title=each.title)
        console().print(escape(each.note), "", sep="\n", highlight=False, soft_wrap=True)
    for path in sorted(out.glob("*.*")):
        console().print(f"  {escape(str(path))}", highlight=False, soft_wrap=True)
