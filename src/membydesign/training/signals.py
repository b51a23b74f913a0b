"""Delay signals that stop a program until a training step is finished and saved."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import FrameType

    from accelerate import Accelerator

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and the signal that batch schedulers send before they kill a process."""


class HeldSignals:
    """Context manager that holds SIGINT and SIGTERM back until `deliver` passes them to the previous handlers.

    A second Ctrl-C takes effect immediately. A second SIGTERM does not, because schedulers may send it several times.
    Ignored signals stay ignored. Python handles signals in the main thread only; elsewhere this has no effect.

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
        """Pass a signal to its handler; if the handler returns, hold signals back again."""
        self._release()
        self.pending = None
        signal.raise_signal(number)
        self._hold()

    def agreed(self, accelerator: Accelerator) -> int | None:
        """Return the signal that any process received, or None: the same for all, so that they stop together.

        All processes must call this method.
        """
        if accelerator.num_processes == 1:
            return self.pending
        mine = torch.tensor([float(self.pending == number) for number in STOPS], device=accelerator.device)
        counts = torch.as_tensor(accelerator.reduce(mine, "sum")).tolist()
        return next((number for number, count in zip(STOPS, counts, strict=True) if count), None)

    def _hold(self) -> None:
        for number in STOPS if self.active else ():
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: not set from Python, so we could not restore it
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
