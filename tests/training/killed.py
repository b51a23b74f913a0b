"""`python killed.py FOLDER KILLS SEED`: train in forked processes that get SIGKILL at random moments, then resume.

Runs are trained one after another until the requested number of processes has been killed; a run that finishes stays in
a folder of its own. The uninterrupted run is in "whole". Prints how many processes were killed, and at which steps.
"""

import os
import random
import select
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from membydesign.training import train
from training.problem import SETTINGS, batch_of, losses_of, model

STEPS = 60
KILL_WITHIN = 9
"""Steps of a session, at most, before its process is killed."""


def run(folder: Path, progress: int) -> None:
    """Train from the last checkpoint on; write a byte for every step."""
    settings = replace(SETTINGS, steps=STEPS, save_every=3)
    small = model(dropout=0.2)

    def watch(_: object) -> None:
        os.write(progress, b".")

    train(small, batch_of, losses_of, settings, seed=0, directory=folder, watch=watch)


def session(folder: Path, kill_after: int | None, delay: float) -> bool:
    """Train in a process of its own, killed `delay` seconds after a number of steps; return whether it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(folder, write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    steps = 0
    while kill_after is None or steps < kill_after:
        select.select([read], [], [])
        news = os.read(read, 1)
        if not news:
            break
        steps += 1
    if kill_after is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    os.close(read)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "a session failed"
    return False


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    started = time.perf_counter()
    session(folder / "whole", None, 0.0)
    a_step = (time.perf_counter() - started) / STEPS
    killed, runs = 0, 0
    while killed < kills:
        finished = False
        while not finished:
            if killed < kills:
                finished = not session(folder / f"{runs}", chance.randrange(KILL_WITHIN), chance.random() * 3 * a_step)
                killed += not finished
            else:
                finished = not session(folder / f"{runs}", None, 0.0)
        runs += 1
    print(killed)


if __name__ == "__main__":
    main()
