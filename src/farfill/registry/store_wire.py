"""Store calls between a role and the registry: POST /v1/store with one msgpack `StoreCall`."""

from __future__ import annotations

import msgspec

from farfill.registry.store import Batch, Change, Delete, Entry, Operation, Put


class EntryMessage(msgspec.Struct, array_like=True):
    """`store.Entry`."""

    key: str
    value: bytes
    created: int
    modified: int
    version: int
    lease: int


class OperationMessage(msgspec.Struct, array_like=True):
    """`store.Put`; `value` None: `store.Delete`."""

    key: str
    value: bytes | None
    lease: int = 0


class GetCall(msgspec.Struct, tag="get"):
    key: str


class ScanCall(msgspec.Struct, tag="scan"):
    prefix: str


class CommitCall(msgspec.Struct, tag="commit"):
    operations: list[OperationMessage]
    conditions: list[tuple[str, int]] = []


class WatchCall(msgspec.Struct, tag="watch"):
    """Long poll: at once when there is something after `after`, else within `wait_s`."""

    prefix: str
    after: int
    wait_s: float


class GrantCall(msgspec.Struct, tag="grant"):
    ttl_s: float


class KeepAliveCall(msgspec.Struct, tag="keep_alive"):
    lease: int


class RevokeCall(msgspec.Struct, tag="revoke"):
    lease: int


StoreCall = GetCall | ScanCall | CommitCall | WatchCall | GrantCall | KeepAliveCall | RevokeCall


class StoreReply(msgspec.Struct, omit_defaults=True):
    """What the call asked for; the other fields keep their defaults."""

    revision: int = 0
    entries: list[EntryMessage] = []
    applied: bool = False
    batches: list[tuple[int, list[tuple[str, EntryMessage | None]]]] = []
    lease: int = 0
    ttl_s: float = 0.0


def entry_message(entry: Entry) -> EntryMessage:
    """To the wire."""
    return EntryMessage(entry.key, entry.value, entry.created, entry.modified, entry.version, entry.lease)


def entry_of(message: EntryMessage) -> Entry:
    """From the wire."""
    m = message
    return Entry(m.key, m.value, m.created, m.modified, m.version, m.lease)


def operation_message(operation: Operation) -> OperationMessage:
    """To the wire."""
    if isinstance(operation, Put):
        return OperationMessage(operation.key, operation.value, operation.lease)
    return OperationMessage(operation.key, None)


def operation_of(message: OperationMessage) -> Operation:
    """From the wire."""
    return Delete(message.key) if message.value is None else Put(message.key, message.value, message.lease)


def batch_message(batch: Batch) -> tuple[int, list[tuple[str, EntryMessage | None]]]:
    """To the wire."""
    return batch.revision, [(c.key, None if c.entry is None else entry_message(c.entry)) for c in batch.changes]


def batch_of(message: tuple[int, list[tuple[str, EntryMessage | None]]]) -> Batch:
    """From the wire."""
    revision, changes = message
    return Batch(revision, tuple(Change(key, None if e is None else entry_of(e)) for key, e in changes))
