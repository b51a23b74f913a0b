"""`mbd evaluate`: what a language model can do, as tables, figures and files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from membydesign.cli.evaluating import (
    ANSWERS,
    LENGTHS,
    BatchSize,
    Device,
    Dtype,
    Lengths,
    Model,
    NiahSettings,
    PerplexitySettings,
    Resume,
    Tokenizer,
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
from membydesign.cli.say import AsJson, fail, need_models
from membydesign.evaluation.niah import NEW_TOKENS, TASKS
from membydesign.evaluation.text import EMBEDDED
from membydesign.experiments import record

evaluate = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@evaluate.callback()
def about() -> None:
    """What a language model can do: needles in haystacks, perplexity by length, and two models compared.

    - **niah**: RULER's needle-in-a-haystack tasks, by length, task and depth
    - **perplexity**: by context length, over windows side by side
    - **compare**: two results of niah, as differences and heat maps

    The model may be one of ours, a Gated DeltaNet of flash-linear-attention, or any causal language model that
    Transformers reads.
    """


@evaluate.command()
def niah(
    model: Model,
    tasks: Annotated[str, typer.Option(help=f"{', '.join(TASKS)}; or all. With commas.")] = "all",
    lengths: Lengths = LENGTHS,
    samples: Annotated[int, typer.Option(min=1, help="Of each task and length.")] = 200,
    essays: Annotated[str, typer.Option(help="The haystack: embedded, a file, or a folder.")] = EMBEDDED,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 0,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer, which count in the length.")
    ] = NEW_TOKENS,
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/niah-MODEL.")] = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """RULER's needle-in-a-haystack: hide sentences in a long text and ask for them.

    For example: `mbd evaluate niah my-model --lengths 1024,2048 --samples 50 --essays PaulGrahamEssays.json`

    The six tasks are RULER's: its wording, depths, and score, the share of answers that 128 greedy tokens contain. The
    same seed, tokenizer and essays give the same questions to every model. `--essays` takes RULER's own
    PaulGrahamEssays.json, .txt files, or a folder of them; the default is Python's own help text.

    Each answer is kept as one line of samples.jsonl as soon as its batch is done: a run that was stopped goes on with
    `--resume`, and so does one that is to have more samples, tasks or lengths.
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
        str, typer.Option(help="What to read: embedded, a file, a folder, or hub:DATASET:CONFIG:SPLIT.")
    ] = EMBEDDED,
    lengths: Lengths = LENGTHS,
    tokens: Annotated[int | None, typer.Option(min=2, help="Only the first so many tokens of the text.")] = None,
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/perplexity-MODEL.")] = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Perplexity by context length: how well each token is foretold from those before it in its window.

    For example: `mbd evaluate perplexity my-model --text books/ --lengths 512,2048`

    The text is read as it is for training: each document (a file, or an object of JSON) after a BOS token, one after
    another. This stream is cut into windows of L tokens side by side, at the same places for every model with this
    tokenizer; the L−1 tokens of each that have something before them are foretold, and BOS tokens among them count.
    Logits are made in pieces, so that long windows need little memory. `--resume` keeps lengths that are done.
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
    first: Annotated[Path, typer.Argument(help="Results of one model: a folder that `mbd evaluate niah` wrote.")],
    second: Annotated[Path, typer.Argument(help="Results of another, which are subtracted.")],
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: runs/compare-FIRST-SECOND.")] = None,
    as_json: AsJson = False,
) -> None:
    """Two models on the same needles: differences by task, length and depth, and the paper's heat maps.

    For example: `mbd evaluate compare runs/niah-ours runs/niah-theirs`

    Only samples that both answered count. Green is where the first finds more.
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
