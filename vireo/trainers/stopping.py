"""Ctrl-C and SIGTERM end a run at the next step, with a checkpoint."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from vireo.parallel import Parallel

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """While it is entered, the first signal is only noted; a second Ctrl-C ends at once.

    A scheduler may signal one process of many, so the ranks agree after each step.
    """

    def __init__(self, parallel: Parallel):
        self.parallel = parallel
        self.seen = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def asked(self) -> int:
        """The signal that any rank has had (0: none), the same on all; collective."""
        return int(self.parallel.max([self.seen])[0])

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.seen = number
