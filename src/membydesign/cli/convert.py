"""`mbd convert`: convert checkpoints of flash-linear-attention to this package."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from membydesign.cli.loading import Dtype, dtype_of
from membydesign.cli.output import AsJson, fail
from membydesign.cli.requirements import need_models
from membydesign.files import to_json

if TYPE_CHECKING:
    from membydesign.models import Conversion


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder, or a name on the Hugging Face Hub.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A new folder for the converted model.")],
    dtype: Dtype = None,
    revision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the Hub. Default: its main branch.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A setting of its config.json to ignore; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a Gated DeltaNet of flash-linear-attention to this package.

    For example: `mbd convert linear-moe-hub/Gated-Deltanet-340M gated-deltanet-340m`

    Reads safetensors in one file or many, in the current format and that of December 2024, without
    flash-linear-attention. If anything does not fit, the error lists all of it. Tokenizer files are copied. `mbd
    generate`, `mbd evaluate` and Transformers read the result.
    """
    need_models("convert")
    from membydesign.models.checkpoint import TOKENIZER_FILES
    from membydesign.models.conversion import convert_fla
    from membydesign.models.quiet import quiet

    torch_dtype = dtype_of(dtype)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise fail(f"DST: expected a new or empty folder, and {destination} has something in it")
    quiet()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("looking", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, description="reading", completed=done, total=total)

        try:
            conversion = convert_fla(
                source, dtype=torch_dtype, revision=revision, ignore=ignore or (), progress=advance
            )
        except ValueError as error:
            raise fail(re.sub("^source:", "SRC:", str(error))) from None
        progress.update(task, description="writing", total=None)
        files = [name for name in TOKENIZER_FILES if (conversion.checkpoint.folder / name).is_file()]
        destination.parent.mkdir(parents=True, exist_ok=True)
        # Written next to DST and then moved, so that DST is never incomplete.
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as scratch:
            made = Path(scratch) / "model"
            conversion.model.save_pretrained(made)
            for name in files:
                shutil.copyfile(conversion.checkpoint.folder / name, made / name)
            if destination.exists():
                destination.rmdir()
            made.rename(destination)
    if as_json:
        print(to_json(_facts(source, destination, conversion, files)), end="")
    else:
        _show(destination, conversion, files)


def _facts(source: str, destination: Path, conversion: Conversion, files: list[str]) -> dict[str, Any]:
    return {
        "source": source,
        "destination": str(destination),
        "tensors": conversion.tensors,
        "elements": conversion.elements,
        "parameters": conversion.parameters,
        "dtype": str(conversion.model.dtype).removeprefix("torch."),
        "tied": bool(conversion.model.config.tie_word_embeddings),
        "skipped": [skipped._asdict() for skipped in conversion.skipped],
        "notes": list(conversion.notes),
        "tokenizer_files": files,
    }


def _show(destination: Path, conversion: Conversion, files: list[str]) -> None:
    config = conversion.model.config
    lines = [
        ("model", f"Gated DeltaNet, {config.num_hidden_layers} layers of width {config.hidden_size}"),
        ("read", f"{conversion.tensors} tensors, {conversion.elements:,} elements stored"),
    ]
    alike: dict[tuple[str, str], list[int]] = {}
    for skipped in conversion.skipped:
        name = re.sub(r"\.layers\.\d+\.", ".layers.*.", skipped.name)
        alike.setdefault((name, skipped.why), []).append(skipped.elements)
    for (name, why), elements in alike.items():
        times = f"{len(elements)} × " if len(elements) > 1 else ""
        lines.append(("skipped", f"{times}{name}, {sum(elements):,} elements: {why}"))
    lines += [("note", note) for note in conversion.notes]
    dtype = str(conversion.model.dtype).removeprefix("torch.")
    lines.append(("written", f"{conversion.parameters:,} parameters, {dtype}, to {destination}"))
    lines.append(("tokenizer", ", ".join(files) or "none there: save one before generating text"))
    console = Console(soft_wrap=True)
    for name, text in lines:
        console.print(f"[bold]{name:<9}[/bold] {escape(text)}", highlight=False)
    if files:
        console.print(f'{"":<9} try it: mbd generate {destination} "Once upon a time"', highlight=False, markup=False)
