"""Time as a dependency: a wall clock for drivers, a virtual one for tests and simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds. `now_s` is monotonic and has no epoch; `unix_s` is the wall clock, for expiry only."""

    def now_s(self) -> float: ...

    def unix_s(self) -> float: ...


class WallClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told."""

    def __init__(self, now_s: float = 0.0, unix_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._offset_s = unix_s - now_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s + self._offset_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds` ≥ 0."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._now_s += seconds
