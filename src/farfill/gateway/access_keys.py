"""The API keys a gateway knows: followed in the registry, or in a file, while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import structlog

from farfill.core.errors import ConfigError, ProtocolError
from farfill.registry.api_keys import key_of
from farfill.registry.key_file import read_key_file
from farfill.registry.mirror import Mirror
from farfill.registry.records import KEYS, KeyRecord
from farfill.registry.store import Store

log = structlog.get_logger("farfill.gateway")

PERIOD_S = 1.0


class KeyBook(Protocol):
    """Use as a context. What was known stays known while its source is away."""

    @property
    def known(self) -> bool:
        """Whether the source has answered at least once."""
        ...

    @property
    def stale_s(self) -> float:
        """For how long the source has been away."""
        ...

    def get(self, key_id: str) -> KeyRecord | None: ...

    def records(self) -> tuple[KeyRecord, ...]: ...

    def reload(self) -> None:
        """Read it now, where that is not done by itself."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class RegistryKeys:
    """Keys of the registry: a change is here within its round trip."""

    def __init__(self, store: Store, changed: Callable[[int], None] = lambda _: None) -> None:
        self._mirror = Mirror(store, KEYS, on_change=self._take)
        self._changed = changed
        self._records: dict[str, KeyRecord] = {}

    @property
    def known(self) -> bool:
        """Whether the registry has answered at least once."""
        return self._mirror.known

    @property
    def stale_s(self) -> float:
        """For how long it has been away."""
        return self._mirror.stale_s

    def get(self, key_id: str) -> KeyRecord | None:
        """The key of that id."""
        return self._records.get(key_id)

    def records(self) -> tuple[KeyRecord, ...]:
        """All."""
        return tuple(self._records.values())

    def reload(self) -> None:
        """They are followed anyway."""

    async def __aenter__(self) -> Self:
        await self._mirror.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._mirror.__aexit__(kind, error, trace)

    def _take(self) -> None:
        found: dict[str, KeyRecord] = {}
        for entry in self._mirror.entries():
            try:
                record = key_of(entry)
            except ProtocolError as error:  # of a newer version, perhaps: that key does not count here
                log.warning("key_unreadable", key=entry.key, error=str(error))
                continue
            found[record.id] = record
        self._records = found
        self._changed(len(found))


class FileKeys:
    """Keys of a file, looked at every second. One with mistakes changes nothing."""

    def __init__(self, path: Path, changed: Callable[[int], None] = lambda _: None) -> None:
        self._path = path
        self._changed = changed
        self._records: dict[str, KeyRecord] = {}
        self._seen: tuple[int, int, int] | None = None
        self._bad = ""
        self._task: asyncio.Task[None] | None = None

    known = True
    stale_s = 0.0

    def get(self, key_id: str) -> KeyRecord | None:
        """The key of that id."""
        return self._records.get(key_id)

    def records(self) -> tuple[KeyRecord, ...]:
        """All."""
        return tuple(self._records.values())

    def reload(self) -> None:
        """Read it now. What is wrong with it is logged."""
        self._seen = None
        self._check()

    async def __aenter__(self) -> Self:
        self._seen = _stamp(self._path)
        self._use(read_key_file(self._path).keys)
        self._task = asyncio.create_task(self._follow(), name="key-file")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self._check()

    def _check(self) -> None:
        stamp = _stamp(self._path)
        if stamp is not None and stamp == self._seen:
            return
        try:
            self._use(read_key_file(self._path).keys)
        except ConfigError as error:
            if str(error) != self._bad:
                self._bad = str(error)
                log.warning("keys_not_reloaded", error=str(error))
            return
        self._seen, self._bad = stamp, ""

    def _use(self, records: Iterable[KeyRecord]) -> None:
        self._records = {record.id: record for record in records}
        self._changed(len(self._records))
        log.info("keys_loaded", count=len(self._records))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
