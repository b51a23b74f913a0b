"""Judge the cases whose `seed:number` arrive on standard input, and answer each with one line of JSON.

A process of its own, so that a signal in native code ends it and not the campaign.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

from fuzzing import known
from fuzzing.cases import Case, Problem, draw
from fuzzing.cases import problem as numbers_of
from fuzzing.judging import judge


def answer(seed: int, number: int) -> dict[str, object]:
    """The verdict of a case as plain data."""
    case = draw(seed, number)
    problem = numbers_of(case)
    verdict = judge(case, problem)
    return {
        "number": number,
        "findings": verdict.findings,
        "known": [known.explanation(case, problem, finding) for finding in verdict.findings],
        "judged": verdict.judged,
        "ill_conditioned": verdict.ill_conditioned,
        "raised": verdict.raised,
        "worst": verdict.worst,
        "about": describe(case, problem),
    }


def describe(case: Case, problem: Problem) -> str:
    """A case in one line."""
    B, T, H, D, M = case.sizes
    options = {name: x for name, x in case.options.items() if name != "threads"}
    strange = {name: layout for name, layout in problem.layouts.items() if layout != "contiguous"}
    return (
        f"{case.label} B={B} T={T} H={H} D={D} M={M}, parameters {case.parameter_dtype}, initial {case.initial_dtype}, "
        f"state_dtype {case.state_dtype}, {case.options['threads']} threads, {options}, keys {case.keys}, "
        f"noises {case.noises}, decays {case.decays}, gradient of {case.target}, layouts {strange}"
    )


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        from kernel_checks.interpreter import faster

        faster()
    except ImportError:
        pass  # without Triton, or outside a checkout: its cases fall back to another backend
    for line in sys.stdin:
        seed, number = map(int, line.split(":"))
        print(json.dumps(answer(seed, number)), flush=True)


if __name__ == "__main__":
    main()
