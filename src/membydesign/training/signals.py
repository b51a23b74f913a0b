"""Signals that ask a program to stop: training holds them back until a step is done and saved."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import FrameType

    from accelerate import Accelerator

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and what batch schedulers send before they kill."""


class HeldSignals:
    """A context in which SIGINT and SIGTERM wait until `deliver` passes them to the handlers that were there before.

    A second Ctrl-C does not wait. A second SIGTERM does: schedulers may send it to a process more than once. Signals
    that are ignored stay so. Python handles signals in the main thread only; in any other, this does nothing.

    Args:
        active: False to let signals through.
    """

    def __init__(self, active: bool = True) -> None:
        self.active = active and threading.current_thread() is threading.main_thread()
        self.pending: int | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> HeldSignals:
        self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        if self.pending is not None:
            signal.raise_signal(self.pending)

    def deliver(self, number: int) -> None:
        """Pass a signal on; returns if its handler does, and holds signals back again."""
        self._release()
        self.pending = None
        signal.raise_signal(number)
        self._hold()

    def agreed(self, accelerator: Accelerator) -> int | None:
        """The signal that one of the processes got, or None; the same for all: one that leaves alone stalls the rest.

        All of them must call this.
        """
        if accelerator.num_processes == 1:
            return self.pending
        mine = torch.tensor([float(self.pending == number) for number in STOPS], device=accelerator.device)
        everyone = torch.as_tensor(accelerator.reduce(mine, "sum")).tolist()
        return next((number for number, count in zip(STOPS, everyone, strict=True) if count), None)

    def _hold(self) -> None:
        for number in STOPS if self.active else ():
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: not set by Python, and so not for us to put back
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _release(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.pending is not None and number == signal.SIGINT:
            self._release()
            self.pending = None
            signal.raise_signal(number)
        elif self.pending is None:
            self.pending = number
