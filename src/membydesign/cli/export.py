"""`mbd export`: write a model as an ONNX graph."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer looks at it
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from membydesign.cli.loading import Model, load_model
from membydesign.cli.output import AsJson, fail
from membydesign.cli.requirements import need_models, need_onnx
from membydesign.files import to_json


def export(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new file, for example model.onnx.")],
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare the graph with the model in ONNX Runtime.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write a language model of this package as an ONNX graph.

    For example: `mbd export runs/characters characters.onnx`

    One graph does prefill and decoding: token ids and the state so far go in, logits and the new state come out, in
    float32, for any batch and any number of tokens. Padding is not supported. ONNX Runtime's LinearAttention runs delta
    rules and additive memories; a Scan over the design's own equations runs other designs. An error names a layer that
    ONNX cannot run, and why.
    """
    need_models("export")
    need_onnx("export")
    import torch

    from membydesign.integrations.onnx import export as write
    from membydesign.models.quiet import quiet

    if out.exists() or not out.parent.is_dir():
        got = "exists already" if out.exists() else "is in a folder that does not exist"
        raise fail(f"OUT: expected a new file in an existing folder, and {out} {got}")
    quiet()
    loaded = load_model(model, torch.float32, "cpu")
    try:
        with Console(stderr=True).status("tracing the model"):
            written = write(loaded, out, check=check)
    except (ValueError, ArithmeticError) as error:
        raise fail(str(error)) from None
    if as_json:
        facts = {**written._asdict(), "path": str(written.path)}
        print(to_json(facts), end="")
        return
    console = Console(soft_wrap=True)
    size = sum(file.stat().st_size for file in (out, out.with_name(f"{out.name}.data")) if file.exists())
    counts = {operator: written.operators.count(operator) for operator in written.operators}
    layers = ", ".join(f"{count} × {operator}" for operator, count in counts.items())
    lines = [("layers", layers), ("state", f"{len(written.inputs) - 1} tensors, past.* and present.*")]
    if written.difference is not None:
        lines.append(("checked", f"differs from the model by at most {written.difference:.1e} of the largest logit"))
    lines.append(("written", f"{size / 1e6:,.1f} MB, opset {written.opset}, to {out}"))
    for name, text in lines:
        console.print(f"[bold]{name:<9}[/bold] {escape(text)}", highlight=False)
