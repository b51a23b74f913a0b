"""What the subcommands of `mbd evaluate` share: options, the folder of a result, and how it is shown."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from membydesign.cli.loading import dtype_of, load_model, load_tokenizer, name_on_the_hub, usable_device
from membydesign.cli.output import console, fail
from membydesign.cli.stopping import resumable
from membydesign.cli.tables import Column, Group, show_table
from membydesign.files import read_object, to_json, write_text
from membydesign.reports import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from membydesign.cli.evaluate.niah import NiahSettings
    from membydesign.cli.evaluate.perplexity import PerplexitySettings

ANSWERS = "samples.jsonl"
LENGTHS = "2048,4096,8192,16384"

Lengths = Annotated[str, typer.Option(metavar="N,N,…", help="Context lengths in tokens, separated by commas.")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Sequences per batch. Default: as many as make 16,384 tokens.")
]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Keep finished work and continue interrupted work.")]


def parse_lengths(words: str) -> list[int]:
    """Parse comma-separated context lengths; the shortest comes first."""
    try:
        numbers = sorted({int(word) for word in split_list(words)})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 2:
        raise fail(f"--lengths: expected whole numbers of at least 2 with commas, such as 2048,4096, got {words!r}")
    return numbers


def split_list(text: str) -> list[str]:
    """Split a comma-separated list into its words."""
    return [word.strip() for word in text.split(",") if word.strip()]


def result_folder(out: Path | None, what: str, model: str, resume: bool, file: str) -> Path:
    """Return the folder of the results; exit with an error if it holds some and `--resume` is not given."""
    on_the_hub = name_on_the_hub(model)
    name = Path(model).resolve().name if on_the_hub is None else Path(on_the_hub).name
    out = Path("runs") / f"{what}-{name}" if out is None else out
    if out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    if not resume and (out / file).exists():
        raise fail(f"--out: {out} holds results; continue them with --resume, or name another folder")
    return out


def load(model: str, tokenizer: str | None, dtype: str | None, device: str | None) -> tuple[Any, Any, str]:
    """Load a model and its tokenizer; return both, and the name of the model's dtype."""
    from membydesign.models.quiet import quiet

    quiet()
    model_tokenizer = load_tokenizer(tokenizer or model)
    lm = load_model(model, dtype_of(dtype), usable_device(device))
    return lm, model_tokenizer, str(lm.dtype).removeprefix("torch.")


def write_settings(out: Path, settings: NiahSettings | PerplexitySettings, preset: str, resuming: bool) -> None:
    """Write config.json; exit with an error if the work to resume was done with other settings."""
    now, file = asdict(settings), out / "config.json"
    if resuming:
        try:
            before = read_object(file)
        except (OSError, ValueError) as error:
            raise fail(f"--resume: expected the settings of what is done in {file}, got an error: {error}") from None
        for name in settings.fixed:
            if before.get(name) != now[name]:
                raise fail(f"--resume: expected {name} as in {file}, {before.get(name)!r}, got {now[name]!r}")
    out.mkdir(parents=True, exist_ok=True)
    write_text(file, to_json({"preset": preset, **now}))


@contextmanager
def options_named(options: Mapping[str, str]) -> Iterator[None]:
    """Turn errors that name one of these arguments into errors that name the option, and exit."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        if name not in options:
            raise
        raise fail(f"{options[name]}:{rest}") from None


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error and yield the function that moves it; work stopped in here can be resumed."""
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
    """Print the tables of a result and its files."""
    if as_json:
        print((out / "metrics.json").read_text(encoding="utf-8"), end="")
        return
    for each in record.read(out).tables:
        columns = [Column(heading, right=i > 0) for i, heading in enumerate(each.headings)]
        show_table(columns, [Group([list(map(str, row)) for row in each.rows])], title=each.title)
        console().print(escape(each.note), "", sep="\n", highlight=False, soft_wrap=True)
    for path in sorted(out.glob("*.*")):
        console().print(f"  {escape(str(path))}", highlight=False, soft_wrap=True)
