"""Prove that a change of the code made nothing slower: time two checkouts in turn, in one run, on an idle machine.

    python .ci/same_speed.py OLD_CHECKOUT NEW_CHECKOUT [--rounds 7] [--threads 2] [--limit 1.05]
    python .ci/same_speed.py CHECKOUT WHEEL_PYTHON --limit 1.15      (prebuilt code compared with code compiled here)

Each checkout runs in a process of its own with the packages of this Python. In place of a checkout stands the Python of
an environment that has a wheel: it runs with a PATH without a compiler. In every round both time the same case, in
turns first, so that a slow phase of the machine meets both; a ratio counts only if the fastest readings have it too.
Cases are those of `mbd bench --only speed`, and RWKV-7's layer. Also compared: the time to import the package after
torch, and that of the first filter in a new process. It exits with 1 if a ratio exceeds the limit in two measurements,
the second in new processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

LAYER = "rwkv7"
SIZES = ((64, 4, 128, 16), (16, 4, 512, 32), (1, 4, 2048, 64), (1, 4, 2048, 128), (1, 4, 2048, 256))
DESIGNS = ("bayesian_layer", "gated_deltanet", "kda", "mamba2")
TASKS = ("forward", "forward+backward", "decode")

# Python's full garbage collection walks torch's 170,000 objects for 90 ms, at whichever import happens to be the next
# one to allocate enough: not part of what an import costs.
FIRST_CALL = """
import torch
import gc; gc.collect(); gc.freeze()
import time; start = time.perf_counter()
import membydesign as mbd; imported = time.perf_counter()
q = torch.randn(1, 64, 2, 16)
mbd.filter_sequence(mbd.catalogue["deltanet"], q, q, q, write_noise=1.0, prior_variance=1.0)
print(1e3 * (imported - start), 1e3 * (time.perf_counter() - imported))
"""


def serve(threads: int) -> None:
    """Answer requests, one JSON line each, with milliseconds; the first request for a case prepares and warms it."""
    import torch

    torch.set_num_threads(threads)
    try:
        from membydesign_bench.problem import Size
        from membydesign_bench.timing import interleaved
        from membydesign_bench.works import OURS, prepare
    except ModuleNotFoundError:  # versions that had the benchmarks in the package
        from membydesign.cli.bench.problem import Size  # pyright: ignore
        from membydesign.cli.bench.timing import interleaved  # pyright: ignore
        from membydesign.cli.bench.works import OURS, prepare  # pyright: ignore
    ready: dict[str, object] = {}
    for line in sys.stdin:
        case, size, task = json.loads(line)
        if line not in ready:
            ready.clear()  # one case at a time, so that memory is that of one
            shape = Size(*size)
            ready[line] = prepare_layer(shape, task) if case == LAYER else prepare(OURS[case], task, shape)
            interleaved({"work": ready[line]}, 1)  # pyright: ignore
        print(json.dumps(interleaved({"work": ready[line]}, 1)["work"]), flush=True)  # pyright: ignore


def prepare_layer(size: tuple[int, ...], task: str) -> object:
    """The layer whose recurrence is not among the rules of the benchmark."""
    import torch

    from membydesign.layers import make_layer

    B, H, T, D = size
    torch.manual_seed(0)
    layer = make_layer(LAYER, H * D, num_heads=H, head_dim=D)
    x = torch.randn(B, T, H * D)
    if task == "decode":
        with torch.no_grad():
            _, belief = layer(x[:, :8])
        return lambda: _without_gradients(layer, x[:, :1], belief)
    if task == "forward":
        return lambda: _without_gradients(layer, x)
    return lambda: torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()), allow_unused=True)


def _without_gradients(layer, *inputs):
    import torch

    with torch.no_grad():
        return layer(*inputs)


def python(checkout: Path) -> str:
    """The Python of a version: its own, or this one for a checkout."""
    return str(checkout) if checkout.is_file() else sys.executable


def environment(checkout: Path) -> dict[str, str]:
    """Let Python import the package and the benchmarks from a checkout, compiled once as it is for users."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if checkout.is_file():
        return {**kept, "PYTHONPATH": str(Path(__file__).parents[1] / "benchmarks"), "PATH": "/none", "CC": ""}
    return {**kept, "PYTHONPATH": os.pathsep.join(str(checkout / part) for part in ("src", "benchmarks"))}


class Version:
    """A checkout that runs in a process of its own."""

    def __init__(self, checkout: Path, threads: int) -> None:
        command = [python(checkout), __file__, "serve", str(threads)]
        self.process = subprocess.Popen(
            command, env=environment(checkout), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time(self, request: list[object]) -> float:
        """Milliseconds of one reading."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def ratio(versions: list[Version], request: list[object], rounds: int) -> tuple[list[float], float]:
    """Median times of both versions, and new over old: the median over rounds or the ratio of the fastest readings.

    The smaller of the two counts, since what slows the code shows in both, and a busy machine often in one alone.
    """
    times = []
    for turn in range(rounds):
        first = turn % 2  # each version comes first in half of the rounds
        readings = {i: versions[i].time(request) for i in (first, 1 - first)}
        times.append([readings[0], readings[1]])
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    fastest = [min(column) for column in zip(*times, strict=True)]
    return medians, min(statistics.median(new / old for old, new in times), fastest[1] / fastest[0])


def starts(checkouts: list[Path], rounds: int) -> list[list[float]]:
    """Median milliseconds to import and to filter for the first time, of each checkout, with compiled code cached."""
    readings: list[list[list[float]]] = [[], []]
    for turn in range(rounds + 1):
        for checkout, rows in zip(checkouts, readings, strict=True):
            text = subprocess.run(
                [python(checkout), "-c", FIRST_CALL],
                env=environment(checkout),
                capture_output=True,
                text=True,
                check=True,
            )
            if turn:
                rows.append([float(number) for number in text.stdout.split()])
    return [[statistics.median(column) for column in zip(*rows, strict=True)] for rows in readings]


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.05)
    parser.add_argument("--tasks", default=",".join(TASKS), help="some of them, separated by commas")
    parser.add_argument("--key-sizes", default=",".join(str(size[-1]) for size in SIZES), help="some of them")
    parser.add_argument("--cases", default=",".join((*DESIGNS, LAYER)), help="some of them, separated by commas")
    arguments = parser.parse_args()
    checkouts = [arguments.old.absolute(), arguments.new.absolute()]  # a Python is a link, which is not to be followed
    old, new = starts(checkouts, arguments.rounds)
    for name, a, b in zip(("import membydesign after torch", "first filter"), old, new, strict=True):
        print(f"{name:52} {a:10.2f} {b:10.2f} ms {b / a:6.2f}", flush=True)
    versions = [Version(checkout, arguments.threads) for checkout in checkouts]
    slower, key_sizes = [], {int(D) for D in arguments.key_sizes.split(",")}
    for task in arguments.tasks.split(","):
        for case in arguments.cases.split(","):
            for size in SIZES:
                if size[-1] not in key_sizes or (case == LAYER and size[-1] not in (32, 64)):
                    continue
                request = [case, size, task]
                medians, relative = ratio(versions, request, arguments.rounds)
                if relative > arguments.limit:  # a second, longer look before it counts, with memory laid out afresh
                    for version in versions:
                        version.process.kill()
                    versions = [Version(checkout, arguments.threads) for checkout in checkouts]
                    medians, relative = ratio(versions, request, 3 * arguments.rounds)
                    if relative > arguments.limit:
                        slower.append(f"{task}, {case}, {size}: {relative:.2f}")
                title = f"{task}, {case}, {','.join(map(str, size))}"
                print(f"{title:52} {medians[0]:10.3f} {medians[1]:10.3f} ms {relative:6.3f}", flush=True)
    print(f"\nslower than {arguments.limit}: {len(slower)}", *slower, sep="\n  ")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    else:
        main()
