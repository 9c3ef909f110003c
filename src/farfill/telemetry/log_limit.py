"""Warnings that strangers can cause at will: the first ones of each reason are written, the rest are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

MOST = 10
WINDOW_S = 10.0


@dataclass(slots=True)
class _Window:
    began_s: float
    written: int = 0
    left_out: int = 0


class LogLimit:
    """At most `most` lines a reason in `window_s` seconds. Reasons must be few and stable. Not for several threads."""

    def __init__(self, now_s: Callable[[], float], *, most: int = MOST, window_s: float = WINDOW_S) -> None:
        self._now_s = now_s
        self._most = most
        self._window_s = window_s
        self._windows: dict[str, _Window] = {}

    def admit(self, reason: str) -> bool:
        """Whether this one is to be written. Ask `left_out` before, or what a former window left out goes on."""
        now_s = self._now_s()
        window = self._windows.setdefault(reason, _Window(now_s))
        if now_s - window.began_s >= self._window_s:
            window.began_s, window.written = now_s, 0
        if window.written < self._most:
            window.written += 1
            return True
        window.left_out += 1
        return False

    def left_out(self, *, at_once: bool = False) -> list[tuple[str, int]]:
        """(reason, lines left out) of every window that is over (`at_once`: of all), each told once."""
        now_s = self._now_s()
        over = [r for r, window in self._windows.items() if at_once or now_s - window.began_s >= self._window_s]
        ended = [(reason, self._windows.pop(reason).left_out) for reason in over]
        return [(reason, count) for reason, count in ended if count]


class LimitedWarnings:
    """Writes warnings of one `event`, limited by their reason, and `<event>_left_out` with the rest's number.

    Safe from any thread.
    """

    def __init__(self, log: FilteringBoundLogger, event: str, now_s: Callable[[], float]) -> None:
        self._log = log
        self._event = event
        self._limit = LogLimit(now_s)
        self._lock = threading.Lock()

    def warning(self, reason: str, **fields: object) -> None:
        """Write it, or count it as left out."""
        self.tell_left_out()
        with self._lock:
            admitted = self._limit.admit(reason)
        if admitted:
            self._log.warning(self._event, reason=reason, **fields)

    def tell_left_out(self, *, at_once: bool = False) -> None:
        """Call now and then, and with `at_once` at the end: nobody may come any more to cause the line."""
        with self._lock:
            left_out = self._limit.left_out(at_once=at_once)
        for reason, count in left_out:
            self._log.warning(f"{self._event}_left_out", reason=reason, count=count)
