"""Decisions with all they rested on: for the request's record, and line by line for `farfill replay`.

The log is written by a thread of its own; what it cannot keep up with is dropped and counted, never waited for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from farfill.policy.replay import record

log = structlog.get_logger("farfill.gateway")

MAX_WAITING = 8192
FLUSH_LINES = 512


@dataclass(frozen=True, slots=True)
class Decision:
    """One policy's answer: the fields of a line of `policy.replay`. Encoded only when somebody looks."""

    policy: str
    inputs: object
    output: object
    request: str
    unix_s: float
    v: int = 1

    def line(self) -> bytes:
        """One JSON line without its end."""
        return record(self.policy, self.inputs, self.output, request=self.request, unix_s=self.unix_s)


@dataclass(slots=True)
class DecisionTrail:
    """The decisions about one request, in order."""

    request: str
    unix_s: float
    decisions: list[Decision] = field(default_factory=list[Decision])

    def add(self, policy: str, inputs: object, output: object) -> None:
        """One more."""
        self.decisions.append(Decision(policy, inputs, output, self.request, self.unix_s))


class DecisionLog:
    """Appends decisions to a file of at most `max_bytes`; a full one is kept as NAME.1 and begun anew."""

    def __init__(self, path: Path, max_bytes: int, on_dropped: Callable[[int], None]) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._on_dropped = on_dropped
        self._waiting: queue.Queue[Decision | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name="decision-log", daemon=True)
        self._failed = False

    def start(self) -> None:
        """Raises OSError when the file cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.open("ab").close()
        self._thread.start()

    def add(self, decisions: list[Decision]) -> None:
        """Never waits."""
        for index, decision in enumerate(decisions):
            try:
                self._waiting.put_nowait(decision)
            except queue.Full:
                self._on_dropped(len(decisions) - index)
                return

    def close(self) -> None:
        """Write what waits, then stop."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _write(self) -> None:
        while True:
            decisions, ended = self._take()
            lines = [decision.line() + b"\n" for decision in decisions]
            try:
                self._append(lines)
                self._failed = False
            except OSError as error:
                self._on_dropped(len(lines))
                if not self._failed:
                    log.error("decision_log_failed", path=str(self._path), error=str(error))
                self._failed = True
            if ended:
                return

    def _take(self) -> tuple[list[Decision], bool]:
        """At least one decision, or the end."""
        taken: list[Decision] = []
        found = self._waiting.get()
        while found is not None:
            taken.append(found)
            if len(taken) == FLUSH_LINES or self._waiting.empty():
                return taken, False
            found = self._waiting.get()
        return taken, True

    def _append(self, lines: list[bytes]) -> None:
        """One write for as many lines as the file has room for."""
        while lines:
            size = self._path.stat().st_size if self._path.exists() else 0
            room, count = self._max_bytes - size, 0
            while count < len(lines) and (room := room - len(lines[count])) >= 0:
                count += 1
            if not count and size:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                continue
            with self._path.open("ab") as file:
                file.write(b"".join(lines[: max(1, count)]))
            del lines[: max(1, count)]
