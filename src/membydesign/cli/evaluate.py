"""`mbd evaluate`: what a language model can do, as tables, figures and files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from membydesign.cli.completion import tasks as tasks_of_ruler
from membydesign.cli.evaluating import (
    ANSWERS,
    LENGTHS,
    BatchSize,
    Lengths,
    NiahSettings,
    PerplexitySettings,
    Resume,
    answers_in,
    fingerprint_of,
    loaded,
    metrics_of,
    named_lengths,
    named_tasks,
    options_named,
    progress_bar,
    result_folder,
    settle,
    show_result,
    write_result,
)
from membydesign.cli.loading import Device, Dtype, Model, Tokenizer  # noqa: TC001 - typer looks at them
from membydesign.cli.say import AsJson, fail, need_models
from membydesign.evaluation.niah import NEW_TOKENS, TASKS
from membydesign.evaluation.text import EMBEDDED
from membydesign.experiments import record

evaluate = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@evaluate.callback()
def about() -> None:
    """Evaluate a language model: needles in haystacks, perplexity by length.

    For example: `mbd evaluate niah my-model --lengths 1024,2048 --samples 50`

    The model may be one of this package, a Gated DeltaNet of flash-linear-attention, or any causal language model that
    Transformers reads.
    """


@evaluate.command()
def niah(
    model: Model,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"Tasks, separated by commas: {', '.join(TASKS)}; or all.",
            autocompletion=tasks_of_ruler,
        ),
    ] = "all",
    lengths: Lengths = LENGTHS,
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Samples per task and length.")] = 200,
    essays: Annotated[
        str, typer.Option(metavar="SOURCE", help="Text of the haystack: embedded, a file or a folder.")
    ] = EMBEDDED,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="The same seed gives the same samples.")] = 0,
    new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens per answer; the context length includes them.")
    ] = NEW_TOKENS,
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for the results. Default: runs/niah-MODEL.")
    ] = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Ask a model for sentences hidden in a long text: RULER's needle tasks.

    For example: `mbd evaluate niah my-model --lengths 1024,2048 --samples 50 --essays PaulGrahamEssays.json`

    Six tasks with RULER's wording, depths and score: the share of answers found in 128 greedy tokens. The same seed,
    tokenizer and essays give every model the same questions. `--essays` takes RULER's PaulGrahamEssays.json, .txt
    files or a folder of them; the default is Python's help text.

    Every finished batch is appended to samples.jsonl. With `--resume`, an interrupted run continues, and a finished one
    can get more samples, tasks or lengths.
    """
    need_models("evaluate niah")
    from membydesign.evaluation.niah import NIAH
    from membydesign.evaluation.niah_haystack import read_essays
    from membydesign.evaluation.niah_run import answer
    from membydesign.experiments.niah_tables import scores_metrics, scores_tables

    wanted, numbers = named_tasks(tasks), named_lengths(lengths)
    out = result_folder(out, "niah", model, resume, ANSWERS)
    with options_named({"essays": "--essays", "length": "--lengths", "tokenizer": "--tokenizer", "file": ANSWERS}):
        haystack = read_essays(essays)
        lm, words, kind = loaded(model, tokenizer, dtype, device)
        settings = NiahSettings(
            model=model,
            tokenizer=tokenizer or model,
            dtype=kind,
            essays=essays,
            essays_fingerprint=haystack.fingerprint,
            new_tokens=new_tokens,
            seed=seed,
            tasks=wanted,
            lengths=numbers,
            samples=samples,
        )
        settle(out, settings, "niah", resume and (out / ANSWERS).exists())
        started = time.perf_counter()
        with progress_bar("samples") as progress:
            answered = answer(
                lm,
                NIAH(words, haystack, new_tokens),
                tasks=wanted,
                lengths=numbers,
                samples=samples,
                seed=seed,
                batch_size=batch_size,
                file=out / ANSWERS,
                progress=progress,
            )
    outcome = record.Outcome(settings, [], scores_metrics(answered), tables=scores_tables(answered))
    write_result(out, outcome, "niah", started, f"RULER needle-in-a-haystack: {Path(model).name}")
    show_result(out, as_json)


@evaluate.command()
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

    numbers, title = named_lengths(lengths), f"Perplexity by context length: {Path(model).name}"
    out = result_folder(out, "perplexity", model, resume, "metrics.json")
    with options_named({"text": "--text", "length": "--lengths", "tokenizer": "--tokenizer"}):
        text_at(text)
        lm, words, kind = loaded(model, tokenizer, dtype, device)
        stream = read_stream(text, words, tokens)
        for length in numbers:
            measure.windows_of(stream, length)
        settings = PerplexitySettings(
            model, tokenizer or model, kind, text, len(stream), fingerprint_of(stream), numbers
        )
        going_on = resume and (out / "metrics.json").exists()
        settle(out, settings, "perplexity", going_on)
        done: dict[str, Any] = metrics_of(out)["by_length"] if going_on else {}
        started = time.perf_counter()
        for length in [each for each in numbers if str(each) not in done]:
            with progress_bar(f"windows of {length:,}") as progress:
                found = measure.perplexity(lm, stream, length, batch_size=batch_size, progress=progress)
            done = dict(sorted({**done, str(length): found.as_dict()}.items(), key=lambda item: int(item[0])))
            outcome = record.Outcome(settings, [], {"by_length": done}, tables=[_perplexity_table(title, done)])
            write_result(out, outcome, "perplexity", started, title)
    show_result(out, as_json)


@evaluate.command()
def compare(
    first: Annotated[
        Path, typer.Argument(metavar="FIRST", help="Results of one model: a folder that `mbd evaluate niah` wrote.")
    ],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Results of another model, which are subtracted.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for the results. Default: runs/compare-FIRST-SECOND."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the answers of two models to the same needle tasks.

    For example: `mbd evaluate compare runs/niah-ours runs/niah-theirs`

    Shows differences by task, length and depth, and draws the paper's heat maps; green means that the first finds
    more. Only samples that both models answered count.
    """
    from membydesign.evaluation.niah_scores import common
    from membydesign.experiments.niah_figures import plot
    from membydesign.experiments.niah_tables import difference_metrics, difference_tables

    names = (first.resolve().name, second.resolve().name)
    out = Path("runs") / f"compare-{names[0]}-{names[1]}" if out is None else out
    if out.exists() and not out.is_dir():
        raise fail(f"--out: expected a folder, and {out} is a file")
    started = time.perf_counter()
    with options_named({"seed": "--seed of both", "results": "FIRST, SECOND", "file": ANSWERS}):
        ours, theirs = common(answers_in(first), answers_in(second))
    metrics = difference_metrics(ours, theirs)
    notes = []
    if metrics["same_prompts"] < metrics["samples"]:
        notes.append(
            f"{metrics['samples'] - metrics['same_prompts']} of {metrics['samples']} samples had other prompts: "
            "another tokenizer, other essays, or another number of tokens for the answer."
        )
        Console(stderr=True, soft_wrap=True).print(f"[yellow]mbd:[/yellow] {notes[0]}", highlight=False)
    title = f"Needles found: {names[0]} minus {names[1]}"
    config = {"first": str(first), "second": str(second)}
    outcome = record.Outcome(config, [], metrics, notes, tables=difference_tables(ours, theirs))
    out.mkdir(parents=True, exist_ok=True)
    write_result(out, outcome, "compare", started, title, plot(ours, theirs, names, out))
    show_result(out, as_json)


def _perplexity_table(title: str, done: dict[str, Any]) -> record.RecordTable:
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
