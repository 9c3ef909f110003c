"""The embedded store: one process, one folder, nothing to install.

One task writes. It takes all calls that wait, drafts them in order, makes the draft durable with a single fsync off
the event loop, and only then applies, answers and tells watchers: nobody ever sees what a crash could take back.
After a restart every lease runs for its whole time again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import structlog

from farfill.clock import Clock
from farfill.core.errors import FarfillError
from farfill.registry.disk import Disk
from farfill.registry.journal import Journal
from farfill.registry.state import Draft, KeyValueState
from farfill.registry.store import (
    Batch,
    Committed,
    Entry,
    Lease,
    LeaseLostError,
    Listing,
    Operation,
    StoreError,
    Unchanged,
    check_commit,
)

log = structlog.get_logger()

MAX_WAITING_CALLS = 4096
MAX_CALLS_A_WRITE = 512
LOG_BYTES = 16 * 1024 * 1024
EXPIRY_PERIOD_S = 0.2


@dataclass(slots=True)
class _Call:
    """One change that waits for its turn; `step` drafts it and returns the answer."""

    step: Callable[[Draft], Any]
    answer: asyncio.Future[Any]


@dataclass
class EmbeddedStore:
    """Implements `store.Store`. Owned by one event loop."""

    disk: Disk
    clock: Clock
    log_bytes: int = LOG_BYTES
    _journal: Journal = field(init=False)
    _state: KeyValueState = field(init=False)
    _expires_s: dict[int, float] = field(default_factory=dict)
    _calls: asyncio.Queue[_Call | None] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_CALLS))
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _closed: bool = True

    @property
    def born(self) -> int:
        """The revision it began with: wall-clock milliseconds, so a store that lost its disk begins later."""
        return self._state.born

    async def __aenter__(self) -> Self:
        self._journal = Journal(self.disk)
        born = int(self.clock.unix_s() * 1000)
        try:
            self._state = await asyncio.to_thread(self._journal.load, born)
        except OSError as error:
            raise StoreError(f"the registry's files cannot be used: {error}", retryable=False) from error
        if self._journal.cut_bytes:
            log.warning("store_tail_cut", nbytes=self._journal.cut_bytes, reason="torn_write")
        now_s = self.clock.now_s()
        self._expires_s = {lease: now_s + ttl_s for lease, ttl_s in self._state.leases().items()}
        self._closed = False
        self._tasks = [
            asyncio.create_task(self._write_all(), name="store-writer"),
            asyncio.create_task(self._expire(), name="store-expiry"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        writer, expiry = self._tasks
        expiry.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await expiry
        await self._calls.put(None)
        await writer
        self._tell()

    async def get(self, key: str) -> Entry | None:
        """The entry of `key`."""
        self._check_open()
        return self._state.get(key)

    async def scan(self, prefix: str) -> Listing:
        """All entries under `prefix`."""
        self._check_open()
        return self._state.scan(prefix)

    async def commit(self, operations: Sequence[Operation], conditions: Sequence[Unchanged] = ()) -> Committed:
        """Durable on return."""
        check_commit(operations, conditions)

        def step(draft: Draft) -> Committed:
            applied = draft.commit(operations, conditions)
            return Committed(applied, draft.revision)

        return await self._call(step)

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch]:
        """From memory: a watcher that falls behind by more than the history hears CompactedError."""
        while True:
            self._check_open()
            moved = self._moved
            for batch in list(self._state.since(after)):
                after = batch.revision
                changes = tuple(change for change in batch.changes if change.key.startswith(prefix))
                if changes:
                    yield Batch(batch.revision, changes)
            if self._state.revision == after:
                await moved.wait()

    async def grant(self, ttl_s: float) -> Lease:
        """A new lease of exactly `ttl_s`."""
        lease = secrets.randbits(62) + 1

        def step(draft: Draft) -> None:
            draft.grant(lease, ttl_s)

        await self._call(step)
        return Lease(lease, ttl_s)

    async def keep_alive(self, lease: int) -> float:
        """Not written down: a restart renews every lease anyway."""
        self._check_open()
        now_s = self.clock.now_s()
        ttl_s = self._state.lease_ttl_s(lease)
        if ttl_s is None or self._expires_s.get(lease, now_s + ttl_s) <= now_s:
            raise LeaseLostError(f"lease {lease} ran out")
        self._expires_s[lease] = now_s + ttl_s
        return ttl_s

    async def revoke(self, lease: int) -> None:
        """Durable on return."""

        def step(draft: Draft) -> None:
            draft.revoke(lease)

        await self._call(step)

    async def _call(self, step: Callable[[Draft], Any]) -> Any:
        self._check_open()
        call = _Call(step, asyncio.get_running_loop().create_future())
        await self._calls.put(call)
        if self._closed and not call.answer.done():
            raise _closed_error()
        return await call.answer

    def _check_open(self) -> None:
        if self._closed:
            raise _closed_error()

    async def _write_all(self) -> None:
        ended = False
        try:
            while not ended:
                calls, ended = await self._waiting()
                await self._write(calls)
                if self._journal.size > self.log_bytes:
                    await self._rotate()
        finally:
            self._closed = True
            while not self._calls.empty():
                if (call := self._calls.get_nowait()) is not None and not call.answer.done():
                    call.answer.set_exception(_closed_error())

    async def _waiting(self) -> tuple[list[_Call], bool]:
        calls: list[_Call] = []
        call = await self._calls.get()
        while call is not None and len(calls) < MAX_CALLS_A_WRITE:
            calls.append(call)
            if self._calls.empty():
                return calls, False
            call = self._calls.get_nowait()
        if call is not None:
            calls.append(call)
        return calls, call is None

    async def _write(self, calls: Sequence[_Call]) -> None:
        draft = Draft(self._state)
        answers: list[tuple[_Call, Any]] = []
        for call in calls:
            if call.answer.cancelled():
                continue
            try:
                answers.append((call, call.step(draft)))
            except FarfillError as error:
                answers.append((call, error))
        try:
            if draft.records:
                await asyncio.to_thread(self._journal.append, draft.records)
        except StoreError as error:
            log.error("store_write_failed", reason=error.reason, error=str(error))
            answers = [(call, error) for call, _ in answers]
        else:
            self._apply(draft)
        for call, answer in answers:
            if call.answer.cancelled():
                continue
            if isinstance(answer, FarfillError):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)

    def _apply(self, draft: Draft) -> None:
        before, now_s = self._state.revision, self.clock.now_s()
        for record in draft.records:
            self._state.apply(record)
            for lease, ttl_s in record.granted:
                self._expires_s[lease] = now_s + ttl_s
            for lease in record.revoked:
                self._expires_s.pop(lease, None)
        if self._state.revision != before:
            self._tell()

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _rotate(self) -> None:
        try:
            await asyncio.to_thread(self._journal.rotate, self._state.saved())
        except OSError as error:
            log.error("store_snapshot_failed", reason="disk_refused", error=str(error))
            self.log_bytes *= 2  # the old log goes on; the next try comes when it has doubled

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            now_s = self.clock.now_s()
            if any(expires_s <= now_s for expires_s in self._expires_s.values()):
                with contextlib.suppress(StoreError):  # logged by the writer; tried again in a moment
                    await self._call(self._revoke_expired)

    def _revoke_expired(self, draft: Draft) -> None:
        now_s = self.clock.now_s()
        for lease in [lease for lease, expires_s in self._expires_s.items() if expires_s <= now_s]:
            draft.revoke(lease)
            log.warning("lease_expired", lease=lease)


def _closed_error() -> StoreError:
    return StoreError("the registry is shutting down", reason="store_closed")
