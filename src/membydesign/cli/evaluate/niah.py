"""`mbd evaluate niah`: ask a model for sentences hidden in a long text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from membydesign.cli.completion import tasks as complete_tasks
from membydesign.cli.evaluate.results import (
    ANSWERS,
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
    split_list,
    write_result,
    write_settings,
)
from membydesign.cli.loading import Device, Dtype, Model, Tokenizer  # noqa: TC001 - typer reads them
from membydesign.cli.output import AsJson, fail
from membydesign.cli.requirements import need_models
from membydesign.errors import did_you_mean
from membydesign.evaluation.niah import NEW_TOKENS, TASKS
from membydesign.evaluation.text import EMBEDDED
from membydesign.reports import record


@dataclass(frozen=True)
class NiahSettings:
    """The options that a result is stored with; those in `fixed` cannot change when a run resumes."""

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

    fixed: ClassVar = ("model", "tokenizer", "dtype", "essays_fingerprint", "new_tokens", "seed")


def niah(
    model: Model,
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"Tasks, separated by commas: {', '.join(TASKS)}; or all.",
            autocompletion=complete_tasks,
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
    from membydesign.evaluation.niah.haystack import read_essays
    from membydesign.evaluation.niah.run import answer
    from membydesign.experiments.shared.niah_tables import scores_metrics, scores_tables

    task_names, context_lengths = parse_tasks(tasks), parse_lengths(lengths)
    out = result_folder(out, "niah", model, resume, ANSWERS)
    with options_named({"essays": "--essays", "length": "--lengths", "tokenizer": "--tokenizer", "file": ANSWERS}):
        haystack = read_essays(essays)
        lm, model_tokenizer, model_dtype = load(model, tokenizer, dtype, device)
        settings = NiahSettings(
            model=model,
            tokenizer=tokenizer or model,
            dtype=model_dtype,
            essays=essays,
            essays_fingerprint=haystack.fingerprint,
            new_tokens=new_tokens,
            seed=seed,
            tasks=task_names,
            lengths=context_lengths,
            samples=samples,
        )
        write_settings(out, settings, "niah", resume and (out / ANSWERS).exists())
        started = time.perf_counter()
        with progress_bar("samples") as progress:
            answered = answer(
                lm,
                NIAH(model_tokenizer, haystack, new_tokens),
                tasks=task_names,
                lengths=context_lengths,
                samples=samples,
                seed=seed,
                batch_size=batch_size,
                file=out / ANSWERS,
                progress=progress,
            )
    outcome = record.Outcome(settings, [], scores_metrics(answered), tables=scores_tables(answered))
    write_result(out, outcome, "niah", started, f"RULER needle-in-a-haystack: {Path(model).name}")
    show_result(out, as_json)


def parse_tasks(words: str) -> list[str]:
    """Parse comma-separated task names, with or without `niah_`, into RULER's order."""
    names = [word if word.startswith("niah_") else f"niah_{word}" for word in split_list(words)]
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
