"""A live copy of everything under one prefix of a store: listed once, then watched from that revision on.

It lives through a store that is away: the last known copy stays, and `stale_s` tells for how long. When history was
cut meanwhile it lists again; what changed then arrives as one change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import structlog

from farfill.core.errors import FarfillError
from farfill.registry.store import CompactedError, Entry, Store

log = structlog.get_logger()

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0


class StoreObserver(Protocol):
    """Hears how each attempt to follow the store ended: "ok" or a stable reason."""

    def registry_answered(self, outcome: str) -> None: ...


class Mirror:
    """`entries` by key as of `revision`. Owned by one event loop; `on_change` is called after every change,
    `on_reach` when the store is away and when it is back."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        on_change: Callable[[], None] = lambda: None,
        on_reach: Callable[[], None] = lambda: None,
        observer: StoreObserver | None = None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._on_change = on_change
        self._on_reach = on_reach
        self._observer = observer
        self._entries: dict[str, Entry] = {}
        self._known = asyncio.Event()
        self._away_since_s: float | None = None
        self._outages = 0
        self._task: asyncio.Task[None] | None = None
        self.revision = 0

    def get(self, key: str) -> Entry | None:
        """The entry of `key`, as last heard."""
        return self._entries.get(key)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, by key."""
        return tuple(self._entries[key] for key in sorted(self._entries))

    @property
    def known(self) -> bool:
        """Whether the store has answered at least once."""
        return self._known.is_set()

    async def wait_known(self) -> None:
        """Until the first listing is there."""
        await self._known.wait()

    @property
    def away(self) -> bool:
        """Whether the store has not answered the last attempt."""
        return self._away_since_s is not None

    @property
    def stale_s(self) -> float:
        """For how long the store has been away; 0 while it answers."""
        return 0.0 if self._away_since_s is None else asyncio.get_running_loop().time() - self._away_since_s

    @property
    def outages(self) -> int:
        """How often it was away and came back."""
        return self._outages

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow(), name=f"mirror-{self._prefix}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _follow(self) -> None:
        backoff_s, listed = FIRST_BACKOFF_S, False
        while True:
            try:
                if not listed:
                    await self._list()
                    listed, backoff_s = True, FIRST_BACKOFF_S
                async for batch in self._store.watch(self._prefix, self.revision):
                    self._answered()
                    backoff_s = FIRST_BACKOFF_S
                    for change in batch.changes:
                        self._take(change.key, change.entry)
                    self.revision = batch.revision
                    self._on_change()
            except CompactedError as error:
                log.info("registry_listed_again", prefix=self._prefix, revision=error.revision, reason=error.reason)
                listed = False
            except FarfillError as error:
                self._failed(error)
                listed = False  # an answer to a listing shows that the store is back; a quiet watch does not
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _list(self) -> None:
        listing = await self._store.scan(self._prefix)
        self._answered()
        entries = {entry.key: entry for entry in listing.entries}
        changed = entries != self._entries or not self.known
        self._entries, self.revision = entries, listing.revision
        self._known.set()
        if changed:
            self._on_change()

    def _take(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = entry

    def _answered(self) -> None:
        if self._observer is not None:
            self._observer.registry_answered("ok")
        if self._away_since_s is not None:
            log.info("registry_back", prefix=self._prefix)
            self._outages += 1
            self._away_since_s = None
            self._on_reach()

    def _failed(self, error: FarfillError) -> None:
        if self._observer is not None:
            self._observer.registry_answered(error.reason)
        if self._away_since_s is None:
            log.warning("registry_away", prefix=self._prefix, reason=error.reason, error=str(error))
            self._away_since_s = asyncio.get_running_loop().time()
            self._on_reach()
