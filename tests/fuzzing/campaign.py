"""Many cases in a few worker processes: progress, findings with their reproducers, and a state file to resume from."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fuzzing.cases import draw


@dataclass
class Progress:
    """What a campaign has shown so far: the content of its state file.

    Attributes:
        seed: of all its cases.
        only: the patterns that cases must match.
        next: all numbers below are done.
        cases: how many were judged.
        findings: one entry each, with its case.
        known: how often each known finding was met.
        raised: how often each documented error was raised and confirmed.
        judged: results and gradients of heads that were compared.
        ill_conditioned: those that rounding alone makes unpredictable.
        seconds: spent so far.
    """

    seed: int
    only: list[str]
    next: int = 0
    cases: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    raised: dict[str, int] = field(default_factory=dict)
    judged: int = 0
    ill_conditioned: int = 0
    seconds: float = 0.0

    @classmethod
    def load(cls, path: Path, seed: int, only: list[str]) -> Progress:
        """The saved progress of the same campaign, or a new one."""
        if path.exists():
            saved = cls(**json.loads(path.read_text()))
            if (saved.seed, saved.only) == (seed, only):
                return saved
        return cls(seed, only)

    def save(self, path: Path) -> None:
        """Write the state file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        os.replace(partial, path)

    def line(self) -> str:
        """One line of progress."""
        rate = self.cases / self.seconds if self.seconds else 0.0
        unpredictable = self.ill_conditioned / max(self.judged + self.ill_conditioned, 1)
        return (
            f"{self.cases:,} cases ({rate:.1f}/s), {len(self.findings)} findings, {sum(self.known.values())} known, "
            f"{sum(self.raised.values())} confirmed errors, {self.judged:,} comparisons ({unpredictable:.1%} more are "
            "ill-conditioned)"
        )


class Campaign:
    """Cases in numerical order, shared among workers.

    Args:
        progress: where to start from; updated as verdicts come in.
        state: the file to save it in.
        cases: stop after so many in all, or None.
        seconds: stop after this time in this run, or None.
        workers: how many processes.
        strict: whether known findings fail the run.
        patience: seconds after which a case counts as hanging.
    """

    def __init__(
        self,
        progress: Progress,
        state: Path,
        *,
        cases: int | None,
        seconds: float | None,
        workers: int = 2,
        strict: bool = False,
        patience: float = 120.0,
    ) -> None:
        self.progress, self.state = progress, state
        self.cases, self.seconds, self.workers = cases, seconds, workers
        self.strict, self.patience = strict, patience
        self.begun, self.before = time.monotonic(), progress.seconds
        self.lock, self.upcoming = threading.Lock(), progress.next
        self.given, self.in_flight = progress.cases, set[int]()
        self.stop = threading.Event()
        self.verdicts: queue.Queue[dict[str, Any]] = queue.Queue()

    def run(self) -> Progress:
        """Run until the end; Ctrl-C saves the state and stops."""
        threads = [threading.Thread(target=self._feed, daemon=True) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        shown = saved = time.monotonic()
        try:
            while any(thread.is_alive() for thread in threads) or not self.verdicts.empty():
                with contextlib.suppress(queue.Empty):
                    self._take(self.verdicts.get(timeout=0.5))
                now = time.monotonic()
                if now - shown > 10:
                    print(self.progress.line(), file=sys.stderr, flush=True)
                    shown = now
                if now - saved > 30:
                    self.progress.save(self.state)
                    saved = now
        except KeyboardInterrupt:
            print("stopped; run the same command to resume", file=sys.stderr)
        finally:
            self.stop.set()
            self.progress.save(self.state)
        return self.progress

    def _next(self) -> int | None:
        """The next number that matches, or None at the end."""
        with self.lock:
            late = self.seconds is not None and time.monotonic() - self.begun > self.seconds
            if self.stop.is_set() or late or (self.cases is not None and self.given >= self.cases):
                return None
            while not draw(self.progress.seed, self.upcoming).matches(self.progress.only):
                self.upcoming += 1
            number = self.upcoming
            self.upcoming += 1
            self.given += 1
            self.in_flight.add(number)
            return number

    def _feed(self) -> None:
        """Keep one worker busy; start another after a crash."""
        worker = None
        while (number := self._next()) is not None:
            worker = worker or start_worker()
            self.verdicts.put(ask(worker, self.progress.seed, number, self.patience))
            if worker.poll() is not None:
                finish(worker)
                worker = None
        if worker is not None:
            finish(worker)

    def _take(self, verdict: dict[str, Any]) -> None:
        """Add a verdict to the progress."""
        progress, number = self.progress, verdict["number"]
        progress.cases += 1
        progress.judged += verdict.get("judged", 0)
        progress.ill_conditioned += verdict.get("ill_conditioned", 0)
        if verdict.get("raised"):
            progress.raised = dict(Counter(progress.raised) + Counter([verdict["raised"]]))
        unexplained = []
        for finding, name in zip(verdict["findings"], verdict["known"], strict=True):
            if name is None or self.strict:
                unexplained.append(finding)
            else:
                progress.known = dict(Counter(progress.known) + Counter([name]))
        if unexplained:
            entry = {"case": f"{progress.seed}:{number}", "about": verdict["about"], "findings": unexplained}
            progress.findings.append(entry)
            print(report(entry), flush=True)
        with self.lock:
            self.in_flight.discard(number)
            progress.next = min(self.in_flight, default=self.upcoming)
        progress.seconds = self.before + time.monotonic() - self.begun


def report(entry: dict[str, Any]) -> str:
    """A finding as it is printed: what, about which case, and how to repeat it."""
    lines = [f"FINDING {entry['case']}: {entry['about']}", *(f"    {finding}" for finding in entry["findings"])]
    return "\n".join([*lines, f"    repeat it: make fuzz CASE={entry['case']}"])


def start_worker() -> subprocess.Popen[str]:
    """A worker process with the paths of this one, in which Triton interprets its kernels."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_INTERPRET": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "fuzzing.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the campaign, which lets workers finish their case
    )


def finish(worker: subprocess.Popen[str]) -> None:
    """Let a worker end, and close its pipes."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()
    worker.wait()
    worker.stdout.close()


def ask(worker: subprocess.Popen[str], seed: int, number: int, patience: float) -> dict[str, Any]:
    """The verdict of a worker; a crash or a case without end is one too."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(f"{seed}:{number}\n")
        worker.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(worker.stdout, selectors.EVENT_READ)
            if not selector.select(patience):
                worker.kill()
                worker.wait()
                return _lost(seed, number, f"no end within {patience:.0f} seconds")
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = ""
    if line:
        return json.loads(line)
    status = worker.wait()
    name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    return _lost(seed, number, f"the process ended with {name}")


def _lost(seed: int, number: int, finding: str) -> dict[str, Any]:
    about = f"{draw(seed, number).label}"
    return {"number": number, "findings": [finding], "known": [None], "about": about}
