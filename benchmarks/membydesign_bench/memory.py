"""Measure the peak memory of each task in a fresh process.

A fresh process imports what it needs, makes its inputs, and runs the same work once at a tiny size, so that libraries,
compiled code and threads are loaded and not counted. Then it reads how much memory is resident, runs the task once at
its real size, and reads the highest level that was reached. The difference is what the task needed on top of its
inputs: outputs, gradients, what is kept for backward, and everything temporary.

The highest level is Linux's VmHWM, set back to the present level by writing 5 to /proc/self/clear_refs. Where that is
not allowed it is the ru_maxrss of getrusage, which cannot be set back: the difference is then to the highest level
before, which in a fresh process is a little above the present one, so it can be a little too small. Both count the
pages of all allocators, not torch's alone.

The process gives large blocks back as soon as they are freed (glibc's threshold for them is held at where it starts).
Otherwise the heap keeps what it may use again, and the same work peaks at levels that differ by a third.

On a GPU it is what torch's allocator for the device counts, from the inputs' level to the highest.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from membydesign_bench import child
from membydesign_bench.problem import GRID, Size
from membydesign_bench.timing import Job, Row, Settings
from membydesign_bench.works import OURS, TASKS, Task, Work, peers, prepare, rule_to_compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRAINING_SIZE = Size(1, 4, 16384, 128)
"""A long sequence, where what is kept for backward counts: the Bayesian Layer, forward+backward."""


def memory(settings: Settings) -> Iterator[Job]:
    """Compare every design with its peer."""
    for task in TASKS:
        for size in settings.sizes or GRID:
            yield Job(f"{task} at {size}: peak memory", partial(_memory, task, size, tuple(OURS), settings.device))
    if not settings.sizes:
        task: Task = "forward+backward"
        ours = partial(_memory, task, TRAINING_SIZE, ("bayesian_layer",), settings.device)
        yield Job(f"{task} at {TRAINING_SIZE}: peak memory", ours)


def _memory(task: Task, size: Size, names: tuple[str, ...], device: str) -> list[Row]:
    rules = {name: rule_to_compare(name, task) for name in names}
    works = {rule: peer() for rule, peer in peers(device).items() if rule in rules.values()}
    theirs = {rule: work.title for rule, work in works.items() if work}
    references = {rule: peak("theirs", rule, task, size, device) for rule in theirs}
    rows = []
    for name, rule in rules.items():
        row = ("memory", task, str(size), OURS[name].title, peak("ours", name, task, size, device), "MiB")
        rows.append(Row(*row, theirs.get(rule, ""), references.get(rule)))
    return rows


def peak(whose: str, name: str, task: Task, size: Size, device: str = "cpu") -> float | None:
    """Peak memory in MiB, measured in a fresh process; None if that process failed, for example for want of memory."""
    command = child.command(__name__, whose, name, task, size, torch.get_num_threads(), device)
    options = child.options(MALLOC_MMAP_THRESHOLD_="131072")
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        print(f"mbd bench: no memory of {whose} {name}, {task} at {size}: {reason[0]}", file=sys.stderr)
        return None
    return json.loads(result.stdout)


def rise(work: Callable[[], object], device: str = "cpu") -> float:
    """By how many MiB memory rises above its present level while `work` runs."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        level = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - level) / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before, after = _status("VmRSS"), lambda: _status("VmHWM")
    except OSError:
        before, after = _highest(), _highest
    result = work()
    highest = after()
    del result
    return max(highest - before, 0.0)


def _status(field: str) -> float:
    """A field of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def _highest() -> float:
    """The highest level of resident memory in this process so far, in MiB."""
    import resource  # which Windows does not have

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def _work(whose: str, name: str, device: str) -> Work:
    work = OURS[name] if whose == "ours" else peers(device)[name]()
    assert work is not None
    return work


def _child(whose: str, name: str, task: Task, size: str, threads: str, device: str) -> None:
    torch.set_num_threads(int(threads))
    work, full = _work(whose, name, device), Size.parse(size)
    prepare(work, task, full._replace(B=1, T=min(full.T, 16)), device)()
    print(json.dumps(rise(prepare(work, task, full, device), device)))


if __name__ == "__main__":
    _child(*sys.argv[1:])  # pyright: ignore[reportArgumentType]
