"""Run tasks in worker processes; if the program or a task is stopped, no process is left behind or newly started."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections import deque
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

from membydesign.training.signals import STOPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from membydesign.training.loop import Progress

    Task = Callable[[Callable[[Progress], None]], None]


MASKS = hasattr(signal, "pthread_sigmask")
"""Whether signals can be blocked. On Windows they cannot: a signal while workers start may leave them behind."""


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of a task."""


class _Failed(NamedTuple):
    """Message of a worker whose task raised an exception."""

    error: Exception
    trace: str


class _Worker:
    """A process that does one task after another, with our end of the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, os.getpid()))
        self.process.start()
        theirs.close()
        self.task = ""

    def give(self, name: str, task: Task) -> None:
        self.task = name
        with suppress(BrokenPipeError):  # the worker has died; `receive` reports it
            self.pipe.send(task)

    def receive(self) -> Progress | _Failed | None:
        """Receive the worker's progress, the failure of its task, or None when it is done."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            error = WorkerDied(
                f"{self.task}: expected its process to finish, and it ended with exit code {code}"
                + (" (killed, perhaps because memory ran out)" if code == -9 else "")
                + "; rerun the same command to resume"
            )
            return _Failed(error, "")


def in_parallel(tasks: Mapping[str, Task], workers: int, watch: Callable[[str, Progress | None], None]) -> None:
    """Run all tasks in other processes.

    If a task fails, active tasks finish and no further one starts; then its exception is raised. If this process is
    interrupted, or `watch` raises, workers receive SIGTERM, upon which `training.train` saves a checkpoint, and this
    function waits until they have ended. A second interruption kills them.

    Args:
        tasks: picklable tasks by name; `task(tell)` receives a function that reports its progress.
        workers: number of processes.
        watch: called with the name of a task and its progress, or None when it is done.

    Raises:
        WorkerDied: if a process ends in the middle of a task.
    """
    waiting = deque(tasks.items())
    if MASKS:
        resource_tracker.ensure_running()  # must start before signals are blocked, since it unblocks them
    pool: list[_Worker] = []
    failure: _Failed | None = None
    try:
        with _blocked():
            for _ in range(min(workers, len(waiting))):
                pool.append(_Worker())
        for worker in pool:
            worker.give(*waiting.popleft())
        busy: dict[Any, _Worker] = {worker.pipe: worker for worker in pool}
        while busy:
            for pipe in wait([*busy]):
                worker = busy[pipe]
                news = worker.receive()
                if news is not None and not isinstance(news, _Failed):
                    watch(worker.task, news)
                    continue
                if isinstance(news, _Failed):
                    failure = failure or news
                    waiting.clear()
                else:
                    watch(worker.task, None)
                if waiting:
                    worker.give(*waiting.popleft())
                else:
                    del busy[pipe]
                    worker.pipe.close()  # which ends the worker
    except BaseException:
        for worker in pool:
            worker.process.terminate()
        raise
    finally:
        _join(pool)
    if failure is not None:
        raise failure.error from (RuntimeError(f"in a worker:\n{failure.trace}") if failure.trace else None)


def _join(pool: list[_Worker]) -> None:
    try:
        for worker in pool:
            worker.process.join()
    finally:  # all have ended, unless we were interrupted again
        for worker in pool:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()


@contextmanager
def _blocked() -> Iterator[None]:
    """Block stop signals, so that processes started inside inherit the block until they can handle them."""
    if not MASKS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, parent: int) -> None:
    """Run tasks until there are no more, or the parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to workers too, but the parent handles it
    signal.signal(signal.SIGTERM, _terminated)
    try:
        if MASKS:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        while True:
            _send(pipe, _done(pipe.recv(), pipe, parent))
    except EOFError:
        return
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGTERM) from None


def _terminated(_number: int, _frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the shutdown
    raise KeyboardInterrupt


def _done(task: Task, pipe: Connection, parent: int) -> _Failed | None:
    last = 0.0

    def tell(progress: Progress) -> None:
        nonlocal last
        if os.getppid() != parent:  # the parent was killed: leave the folder to the next sweep
            os._exit(1)
        if time.monotonic() - last > 0.5 or progress.step == progress.steps:
            last = time.monotonic()
            _send(pipe, progress)

    try:
        task(tell)
    except Exception as error:
        return _Failed(_portable(error), traceback.format_exc())
    return None


def _send(pipe: Connection, message: object) -> None:
    try:
        pipe.send(message)
    except OSError:  # the parent was killed
        os._exit(1)


def _portable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled, otherwise one with the same message."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # exceptions of other packages may fail in any way when they are copied
        return RuntimeError(f"{type(error).__name__}: {error}")
