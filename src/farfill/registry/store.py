"""What a registry store is: versioned keys under one revision, compare-and-swap, leases, and a resumable watch.

Every store keeps these promises (`tests/flow/test_store_conformance.py` runs one suite on all of them):

- one revision counts the commits that changed something; each key knows the revisions that made and last changed it;
- a commit is applied whole or not at all, and only while every condition holds;
- what a call returned is durable as far as the store is;
- a watch yields every commit after a revision, in order, without gaps, each exactly once; where history was cut it
  raises CompactedError, and the caller lists again;
- keys put with a lease vanish, in one commit, when the lease is revoked or not renewed in time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from farfill.core.errors import FarfillError, InvalidRequestError, Side

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 1024 * 1024
MAX_OPERATIONS = 100


class StoreError(FarfillError):
    """The store cannot answer now, or not at all."""

    reason = "store_unavailable"
    retryable = True
    side: Side = "registry"


class CompactedError(StoreError):
    """History up to `revision` is gone: list again and watch from there."""

    reason = "compacted"

    def __init__(self, revision: int) -> None:
        super().__init__(f"the history up to revision {revision} is gone; list again")
        self.revision = revision


class LeaseLostError(StoreError):
    """The lease ran out, was revoked, or never was; its keys are gone."""

    reason = "lease_lost"
    retryable = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One key. `created` and `modified` are revisions; `version` counts puts since; lease 0: none."""

    key: str
    value: bytes = field(repr=False)
    created: int
    modified: int
    version: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Set `key`; a lease of 0 takes it off any lease it was on."""

    key: str
    value: bytes = field(repr=False)
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove `key`, if it is there."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Holds while `key` was last changed at revision `modified`; 0: while it does not exist."""

    key: str
    modified: int


@dataclass(frozen=True, slots=True)
class Committed:
    """`applied` is False when a condition did not hold. `revision` is the store's after the call."""

    applied: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Entries by key, all as of `revision`."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """One key after a commit; `entry` None: it was removed."""

    key: str
    entry: Entry | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What one commit changed under the watched prefix."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """`ttl_s` as granted, which may be longer than asked for."""

    id: int
    ttl_s: float


class Store(Protocol):
    """Call within `async with`. Every call raises StoreError while the store cannot be had.

    `born` is the revision its history began with; 0 where that is not known.
    """

    @property
    def born(self) -> int: ...

    async def get(self, key: str) -> Entry | None: ...

    async def scan(self, prefix: str) -> Listing: ...

    async def commit(self, operations: Sequence[Operation], conditions: Sequence[Unchanged] = ()) -> Committed:
        """Raises LeaseLostError when a put names a lease that is gone; nothing is changed then."""
        ...

    def watch(self, prefix: str, after: int) -> AsyncGenerator[Batch]:
        """Commits after revision `after` that changed something under `prefix`. Never ends by itself."""
        ...

    async def grant(self, ttl_s: float) -> Lease: ...

    async def keep_alive(self, lease: int) -> float:
        """Renew; returns the seconds it holds from now. Raises LeaseLostError."""
        ...

    async def revoke(self, lease: int) -> None:
        """End the lease and remove its keys. Idempotent."""
        ...


def check_commit(operations: Sequence[Operation], conditions: Sequence[Unchanged]) -> None:
    """Raises InvalidRequestError on what not every store could do."""
    if len(operations) > MAX_OPERATIONS or len(conditions) > MAX_OPERATIONS:
        raise InvalidRequestError(f"a commit has at most {MAX_OPERATIONS} operations and as many conditions")
    keys = [operation.key for operation in operations]
    if len(set(keys)) < len(keys):
        raise InvalidRequestError("a commit changes each key at most once")
    for key in (*keys, *(condition.key for condition in conditions)):
        if not key or len(key.encode()) > MAX_KEY_BYTES or not key.isprintable():
            raise InvalidRequestError(f"{key[:80]!r} is no key: 1 to {MAX_KEY_BYTES} bytes of printable text")
    for operation in operations:
        if isinstance(operation, Put) and len(operation.value) > MAX_VALUE_BYTES:
            raise InvalidRequestError(f"{operation.key}: a value has at most {MAX_VALUE_BYTES} bytes")
