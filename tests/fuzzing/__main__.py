"""`python -m fuzzing`: run cases, resume a campaign, or repeat one case. Exit code 1 if anything was found."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=None, help="how many cases in all (default 20,000)")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time instead")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign; each seed has cases of its own")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="design/mode/dtype, such as 'dense*/native*'"
    )
    parser.add_argument("--case", default=None, metavar="SEED:NUMBER", help="repeat one case, in this process")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--state", type=Path, default=Path("runs/fuzz/state.json"), help="file to resume from")
    parser.add_argument("--fresh", action="store_true", help="start over, without the state file")
    parser.add_argument("--strict", action="store_true", help="fail on the findings of fuzzing/known.py too")
    options = parser.parse_args()
    if options.case is not None:
        return repeat(*map(int, options.case.split(":")), strict=options.strict)

    from fuzzing.campaign import Campaign, Progress

    if options.fresh:
        options.state.unlink(missing_ok=True)
    progress = Progress.load(options.state, options.seed, options.only)
    cases = options.cases if options.cases or options.seconds else 20_000
    campaign = Campaign(
        progress,
        options.state,
        cases=cases,
        seconds=options.seconds,
        workers=options.workers,
        strict=options.strict,
    )
    for stop in (signal.SIGINT, signal.SIGTERM):  # also in the background, where Ctrl-C is ignored at first
        signal.signal(stop, signal.default_int_handler)
    progress = campaign.run()
    print(progress.line())
    for name, count in sorted(progress.known.items()):
        print(f"    known, {count} times: {name}")
    return 1 if progress.findings else 0


def repeat(seed: int, number: int, *, strict: bool) -> int:
    """One case in this process, where a debugger can follow it."""
    os.environ["TRITON_INTERPRET"] = "1"

    from fuzzing.worker import answer

    verdict = answer(seed, number)
    findings, known = verdict["findings"], verdict["known"]
    assert isinstance(findings, list)
    assert isinstance(known, list)
    print(verdict["about"])
    for finding, name in zip(findings, known, strict=True):
        print(f"    {finding}{f' (known: {name})' if name else ''}")
    worst = f"largest distance {verdict['worst']:.2g} of its tolerance"
    print(f"{len(findings)} findings, {verdict['judged']} comparisons, {worst}, raised {verdict['raised']}")
    return int(any(name is None or strict for name in known))


if __name__ == "__main__":
    sys.exit(main())
