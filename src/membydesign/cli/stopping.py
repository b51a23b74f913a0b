"""How `mbd` stops: Ctrl-C and SIGTERM end every command with one line and the exit code that shells expect.

Only Python's own packages are imported here: the entry point needs this before anything else is loaded.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Stopped(KeyboardInterrupt):
    """A command that a signal stopped.

    Attributes:
        number: of the signal.
        resumable: whether `--resume` would go on with what is done.
    """

    def __init__(self, number: int = signal.SIGINT, resumable: bool = False) -> None:
        super().__init__(number, resumable)
        self.number, self.resumable = number, resumable

    @property
    def exit_code(self) -> int:
        """As shells count: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number

    @staticmethod
    def of(error: KeyboardInterrupt) -> Stopped:
        """An interruption, with the signal that it stands for."""
        return error if isinstance(error, Stopped) else Stopped()


@contextmanager
def sigterm_stops() -> Iterator[None]:
    """Have SIGTERM stop a command as Ctrl-C does; batch schedulers send it before they kill."""

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a scheduler may repeat it, which must not disturb what is being saved
        raise Stopped(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def resumable() -> Iterator[None]:
    """Whatever is stopped in here goes on with `--resume`, and the user is told so."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(Stopped.of(error).number, resumable=True) from None


def say_stopped(stopped: Stopped, program: str = "mbd", words: Sequence[str] = ()) -> None:
    """Say on standard error that a command was stopped and, if it can go on, how; once for all launched processes.

    Args:
        stopped: by what.
        program: how the command was called.
        words: what followed.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if not stopped.resumable:
        text = "mbd: stopped"
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        text = "mbd: stopped; to resume, rerun the same `accelerate launch` command with --resume"
    else:
        resume = [] if "--resume" in words else ["--resume"]
        text = f"mbd: stopped; to resume:\n  {_typed(program)} {shlex.join([*words, *resume])}"
    print(text, file=sys.stderr)


def _typed(program: str) -> str:
    """The program as a shell finds it: by its name if that is on the path, else as it was called."""
    called = sys.argv[0]
    if os.path.basename(called) != program:  # `python -m membydesign.cli`
        return program
    on_path = shutil.which(program)
    if not os.path.exists(called):  # launchers on Windows leave out the .exe
        return program
    return program if on_path is not None and os.path.samefile(on_path, called) else shlex.quote(called)
