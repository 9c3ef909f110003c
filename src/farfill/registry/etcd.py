"""The etcd store: the same promises, kept by a real etcd cluster (3.4 and later)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from math import ceil
from types import TracebackType
from typing import Self

import msgspec

from farfill.registry.etcd_calls import CALL_TIMEOUT_S, EtcdCalls
from farfill.registry.store import (
    Batch,
    Change,
    Committed,
    CompactedError,
    Entry,
    Lease,
    LeaseLostError,
    Listing,
    Operation,
    Put,
    StoreError,
    Unchanged,
    check_commit,
)

QUIET_S = 20.0
PAGE_ENTRIES = 1000


class _Header(msgspec.Struct):
    revision: int = 0


class _KeyValue(msgspec.Struct):
    key: bytes
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    value: bytes = b""
    lease: int = 0


class _Range(msgspec.Struct, omit_defaults=True):
    key: bytes
    range_end: bytes = b""
    limit: str = ""
    revision: str = ""


class _RangeReply(msgspec.Struct):
    header: _Header
    kvs: list[_KeyValue] = []
    more: bool = False


class _Compare(msgspec.Struct):
    key: bytes
    mod_revision: str
    result: str = "EQUAL"
    target: str = "MOD"


class _PutRequest(msgspec.Struct):
    key: bytes
    value: bytes
    lease: str


class _KeyOnly(msgspec.Struct):
    key: bytes


class _Step(msgspec.Struct, omit_defaults=True):
    request_put: _PutRequest | None = None
    request_delete_range: _KeyOnly | None = None


class _Txn(msgspec.Struct):
    compare: list[_Compare]
    success: list[_Step]


class _TxnReply(msgspec.Struct):
    header: _Header
    succeeded: bool = False


class _WatchOptions(msgspec.Struct):
    key: bytes
    range_end: bytes
    start_revision: str
    progress_notify: bool = True


class _Watch(msgspec.Struct):
    create_request: _WatchOptions


class _Event(msgspec.Struct):
    kv: _KeyValue
    type: str = "PUT"


class _WatchReply(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[_Event] = []


class _StreamFault(msgspec.Struct):
    message: str = ""


class _WatchLine(msgspec.Struct):
    result: _WatchReply | None = None
    error: _StreamFault | None = None


class _Grant(msgspec.Struct):
    TTL: str


class _LeaseId(msgspec.Struct):
    ID: str


class _LeaseReply(msgspec.Struct):
    ID: int = 0
    TTL: int = 0


class _KeepAliveLine(msgspec.Struct):
    result: _LeaseReply


class _Empty(msgspec.Struct):
    pass


@dataclass
class EtcdStore:
    """Implements `store.Store`. All its keys begin with `prefix`, which etcd's roles can be bound to.

    A watch that was silent for `quiet_s` begins again, and fails when that takes over `begin_s`: together, how long a
    hung etcd goes unnoticed.
    """

    calls: EtcdCalls
    prefix: str
    quiet_s: float = QUIET_S
    begin_s: float = CALL_TIMEOUT_S

    @property
    def born(self) -> int:
        """Not known of etcd."""
        return 0

    async def __aenter__(self) -> Self:
        await self.calls.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.calls.close()

    async def get(self, key: str) -> Entry | None:
        """Linearizable."""
        reply = await self.calls.call("/v3/kv/range", _Range(self._key(key)), _RangeReply)
        return self._entry(reply.kvs[0]) if reply.kvs else None

    async def scan(self, prefix: str) -> Listing:
        """In pages, all of the first page's revision."""
        start, end = self._span(prefix)
        entries: list[Entry] = []
        revision = 0
        while True:
            body = _Range(start, end, str(PAGE_ENTRIES), str(revision) if revision else "")
            reply = await self.calls.call("/v3/kv/range", body, _RangeReply)
            revision = revision or reply.header.revision
            entries += [self._entry(kv) for kv in reply.kvs]
            if not reply.more:
                return Listing(tuple(entries), revision)
            start = reply.kvs[-1].key + b"\0"

    async def commit(self, operations: Sequence[Operation], conditions: Sequence[Unchanged] = ()) -> Committed:
        """One transaction. After "unreachable" or "timeout" it may have happened all the same."""
        check_commit(operations, conditions)
        compare = [_Compare(self._key(c.key), str(c.modified)) for c in conditions]
        reply = await self.calls.call("/v3/kv/txn", _Txn(compare, [self._step(o) for o in operations]), _TxnReply)
        return Committed(reply.succeeded, reply.header.revision)

    async def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch]:
        """Begins again after the last revision seen when the stream ends or is silent for long."""
        start, end = self._span(prefix)
        while True:
            body = _Watch(_WatchOptions(start, end, str(after + 1)))
            answered = False
            async for line in self.calls.lines("/v3/watch", body, _WatchLine, self.quiet_s, self.begin_s):
                answered = True
                reply = _watched(line, after)
                for batch in self._batches(reply.events):
                    after = batch.revision
                    yield batch
                if not reply.created and not reply.events:
                    after = max(after, reply.header.revision)  # a sign of progress: nothing up to there
            if not answered:
                raise StoreError("etcd: the watch ended before it began", reason="watch_ended")

    async def grant(self, ttl_s: float) -> Lease:
        """Whole seconds, and not less than etcd's own minimum (about two heartbeat elections)."""
        reply = await self.calls.call("/v3/lease/grant", _Grant(str(max(1, ceil(ttl_s)))), _LeaseReply)
        return Lease(reply.ID, float(reply.TTL))

    async def keep_alive(self, lease: int) -> float:
        """Renew."""
        reply = await self.calls.call("/v3/lease/keepalive", _LeaseId(str(lease)), _KeepAliveLine)
        if reply.result.TTL <= 0:
            raise LeaseLostError(f"lease {lease} ran out")
        return float(reply.result.TTL)

    async def revoke(self, lease: int) -> None:
        """End it now."""
        try:
            await self.calls.call("/v3/lease/revoke", _LeaseId(str(lease)), _Empty)
        except LeaseLostError:
            return

    def _key(self, key: str) -> bytes:
        return (self.prefix + key).encode()

    def _span(self, prefix: str) -> tuple[bytes, bytes]:
        """The key range of all keys that begin with `prefix`."""
        start = self._key(prefix)
        return start, start[:-1] + bytes([start[-1] + 1])

    def _entry(self, kv: _KeyValue) -> Entry:
        key = kv.key.decode()[len(self.prefix) :]
        return Entry(key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)

    def _step(self, operation: Operation) -> _Step:
        if isinstance(operation, Put):
            return _Step(request_put=_PutRequest(self._key(operation.key), operation.value, str(operation.lease)))
        return _Step(request_delete_range=_KeyOnly(self._key(operation.key)))

    def _batches(self, events: list[_Event]) -> list[Batch]:
        """Events of one revision always come in one message."""
        changes: dict[int, list[Change]] = {}
        for event in events:
            entry = self._entry(event.kv)
            gone = event.type == "DELETE"
            changes.setdefault(entry.modified, []).append(Change(entry.key, None if gone else entry))
        return [Batch(revision, tuple(changed)) for revision, changed in sorted(changes.items())]


def _watched(line: _WatchLine, after: int) -> _WatchReply:
    """Raises CompactedError, or StoreError when etcd ended the watch for another reason."""
    if line.result is None:
        text = line.error.message if line.error is not None else "an empty message"
        raise StoreError(f"etcd: {text}", reason="watch_ended")
    reply = line.result
    if reply.compact_revision:
        raise CompactedError(reply.compact_revision)
    if reply.created and not reply.canceled and reply.header.revision < after:
        raise CompactedError(reply.header.revision)  # restored from a copy: this is another history
    if reply.canceled:
        raise StoreError(f"etcd: the watch was cancelled: {reply.cancel_reason}", reason="watch_ended")
    return reply
