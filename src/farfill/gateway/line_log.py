"""Appends lines to a bounded file from a thread of its own; what it cannot keep up with is dropped and counted."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

import structlog

log = structlog.get_logger("farfill.gateway")

MAX_WAITING = 8192
FLUSH_LINES = 512
MAX_LINE_BYTES = 1 << 20


class Line(Protocol):
    """Encoded by the writing thread."""

    def line(self) -> bytes:
        """Without its end."""
        ...


Entry = TypeVar("Entry", bound=Line)


class LineLog(Generic[Entry]):
    """A file of at most `max_bytes`; a full one is kept as NAME.1 and begun anew. `name` is its thread's."""

    name = "line-log"

    def __init__(self, path: Path, max_bytes: int, on_dropped: Callable[[int], None]) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._on_dropped = on_dropped
        self._waiting: queue.Queue[Entry | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name=self.name, daemon=True)
        self._failed = False

    def start(self) -> None:
        """Raises OSError when the file cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            _cut_to_whole_lines(file)
        self._thread.start()

    def add(self, entries: Sequence[Entry]) -> None:
        """Never waits."""
        for index, entry in enumerate(entries):
            try:
                self._waiting.put_nowait(entry)
            except queue.Full:
                self._on_dropped(len(entries) - index)
                return

    def close(self) -> None:
        """Write what waits, then stop."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _write(self) -> None:
        while True:
            entries, ended = self._take()
            lines = [entry.line() + b"\n" for entry in entries]
            try:
                self._append(lines)
                self._failed = False
            except OSError as error:
                self._on_dropped(len(lines))
                if not self._failed:
                    log.error(f"{self.name.replace('-', '_')}_failed", path=str(self._path), error=str(error))
                self._failed = True
            if ended:
                return

    def _take(self) -> tuple[list[Entry], bool]:
        """At least one entry, or the end."""
        taken: list[Entry] = []
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


def _cut_to_whole_lines(file: BinaryIO) -> None:
    """Drop what a process that was killed left of its last line."""
    end = file.seek(0, os.SEEK_END)
    begin = max(0, end - MAX_LINE_BYTES)
    file.seek(begin)
    tail = file.read()
    if tail and not tail.endswith(b"\n"):
        file.truncate(begin + tail.rfind(b"\n") + 1)
