"""The embedded store's state as a pure machine: records are drafted, made durable elsewhere, then applied.

Replay after a restart applies the very same records, so what is read back is what was served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from farfill.registry.store import (
    Batch,
    Change,
    CompactedError,
    Entry,
    LeaseLostError,
    Listing,
    Operation,
    Put,
    Unchanged,
)

HISTORY_COMMITS = 10_000


class Write(msgspec.Struct, array_like=True, frozen=True):
    """One key of a record; `value` None removes it."""

    key: str
    value: bytes | None
    lease: int = 0


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One step of the state. `revision` moves on exactly when there are writes."""

    revision: int
    writes: tuple[Write, ...] = ()
    granted: tuple[tuple[int, float], ...] = ()
    revoked: tuple[int, ...] = ()


class SavedEntry(msgspec.Struct, array_like=True, frozen=True):
    """`store.Entry` on disk."""

    key: str
    value: bytes
    created: int
    modified: int
    version: int
    lease: int


class SavedState(msgspec.Struct, array_like=True, frozen=True):
    """Everything at one revision. `born` is the revision the store began with."""

    born: int
    revision: int
    entries: list[SavedEntry]
    leases: list[tuple[int, float]]


@dataclass(slots=True)
class _HeldLease:
    ttl_s: float
    keys: set[str] = field(default_factory=set[str])


class KeyValueState:
    """Entries, leases and the latest history. `revision` starts at `born`."""

    def __init__(self, born: int = 1) -> None:
        self.born = born
        self.revision = born
        self._entries: dict[str, Entry] = {}
        self._keys: list[str] = []
        self._leases: dict[int, _HeldLease] = {}
        self._history: deque[Batch] = deque(maxlen=HISTORY_COMMITS)

    @classmethod
    def restored(cls, saved: SavedState) -> KeyValueState:
        """As it was saved; older history is gone."""
        state = cls(saved.born)
        state.revision = saved.revision
        state._leases = {lease: _HeldLease(ttl_s) for lease, ttl_s in saved.leases}
        for e in saved.entries:
            state._set(Entry(e.key, e.value, e.created, e.modified, e.version, e.lease))
        return state

    def saved(self) -> SavedState:
        """A copy for the disk."""
        entries = [
            SavedEntry(e.key, e.value, e.created, e.modified, e.version, e.lease) for e in self._entries.values()
        ]
        return SavedState(self.born, self.revision, entries, [(i, held.ttl_s) for i, held in self._leases.items()])

    @property
    def compacted(self) -> int:
        """A watch can resume from this revision or a later one."""
        return self.revision - len(self._history)

    def get(self, key: str) -> Entry | None:
        """The entry of `key`."""
        return self._entries.get(key)

    def scan(self, prefix: str) -> Listing:
        """All entries under `prefix`, by key."""
        found: list[Entry] = []
        for index in range(bisect_left(self._keys, prefix), len(self._keys)):
            key = self._keys[index]
            if not key.startswith(prefix):
                break
            found.append(self._entries[key])
        return Listing(tuple(found), self.revision)

    def since(self, after: int) -> Iterator[Batch]:
        """All commits after revision `after`. Raises CompactedError where they are not known (any more)."""
        if not self.compacted <= after <= self.revision:
            raise CompactedError(self.compacted)
        return islice(self._history, after - self.compacted, None)

    def leases(self) -> dict[int, float]:
        """Granted TTL by lease."""
        return {lease: held.ttl_s for lease, held in self._leases.items()}

    def lease_ttl_s(self, lease: int) -> float | None:
        """Granted TTL; None: there is no such lease."""
        held = self._leases.get(lease)
        return None if held is None else held.ttl_s

    def lease_keys(self, lease: int) -> set[str] | None:
        """Keys on `lease`; None: there is no such lease."""
        held = self._leases.get(lease)
        return None if held is None else held.keys

    def apply(self, record: Record) -> None:
        """Take a drafted or replayed record. Records come in order, each exactly once."""
        for lease, ttl_s in record.granted:
            self._leases[lease] = _HeldLease(ttl_s)
        if record.writes:
            assert record.revision == self.revision + 1, "records are applied in order"
            self.revision = record.revision
            changes = [Change(w.key, self._write(w, record.revision)) for w in record.writes]
            self._history.append(Batch(record.revision, tuple(changes)))
        for lease in record.revoked:
            self._leases.pop(lease, None)

    def _write(self, write: Write, revision: int) -> Entry | None:
        old = self._entries.get(write.key)
        if old is not None and old.lease:
            self._leases[old.lease].keys.discard(write.key)
        entry = next_entry(old, write, revision)
        if entry is None:
            if old is not None:
                del self._entries[write.key]
                del self._keys[bisect_left(self._keys, write.key)]
        else:
            self._set(entry)
        return entry

    def _set(self, entry: Entry) -> None:
        if entry.key not in self._entries:
            insort(self._keys, entry.key)
        self._entries[entry.key] = entry
        if entry.lease:
            self._leases[entry.lease].keys.add(entry.key)


class Draft:
    """Steps that follow `state` without changing it: see `records`. Later steps see earlier ones."""

    def __init__(self, state: KeyValueState) -> None:
        self._state = state
        self._changed: dict[str, Entry | None] = {}
        self._granted: set[int] = set()
        self._revoked: set[int] = set()
        self.revision = state.revision
        self.records: list[Record] = []

    def commit(self, operations: Sequence[Operation], conditions: Sequence[Unchanged]) -> bool:
        """Whether it applies. Raises LeaseLostError, having drafted nothing."""
        for condition in conditions:
            entry = self._entry(condition.key)
            if (0 if entry is None else entry.modified) != condition.modified:
                return False
        writes: list[Write] = []
        for operation in operations:
            if isinstance(operation, Put):
                if operation.lease and not self._has_lease(operation.lease):
                    raise LeaseLostError(f"{operation.key}: there is no lease {operation.lease}")
                writes.append(Write(operation.key, operation.value, operation.lease))
            elif self._entry(operation.key) is not None:
                writes.append(Write(operation.key, None))
        self._add(writes)
        return True

    def grant(self, lease: int, ttl_s: float) -> None:
        """A new lease."""
        self._granted.add(lease)
        self.records.append(Record(self.revision, granted=((lease, ttl_s),)))

    def revoke(self, lease: int) -> bool:
        """Whether there was such a lease."""
        if not self._has_lease(lease):
            return False
        keys = set(self._state.lease_keys(lease) or ()) | set(self._changed)
        held = sorted(key for key in keys if (entry := self._entry(key)) is not None and entry.lease == lease)
        self._revoked.add(lease)
        self._add([Write(key, None) for key in held], revoked=(lease,))
        return True

    def _add(self, writes: list[Write], revoked: tuple[int, ...] = ()) -> None:
        if writes:
            self.revision += 1
            for write in writes:
                self._changed[write.key] = next_entry(self._entry(write.key), write, self.revision)
        if writes or revoked:
            self.records.append(Record(self.revision, tuple(writes), (), revoked))

    def _entry(self, key: str) -> Entry | None:
        return self._changed[key] if key in self._changed else self._state.get(key)

    def _has_lease(self, lease: int) -> bool:
        if lease in self._revoked:
            return False
        return lease in self._granted or self._state.lease_keys(lease) is not None


def next_entry(old: Entry | None, write: Write, revision: int) -> Entry | None:
    """What `write` makes of `old`."""
    if write.value is None:
        return None
    created, version = (revision, 0) if old is None else (old.created, old.version)
    return Entry(write.key, write.value, created, revision, version + 1, write.lease)
