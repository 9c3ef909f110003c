"""Changes of rollout shares in the store: each with a version, an author and a reason, and a line in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote, unquote

from farfill.core.cluster import Role
from farfill.core.errors import ProtocolError
from farfill.registry.audit import audit_put, forget_old_audit
from farfill.registry.records import (
    ROLLOUT,
    AuditRecord,
    RolloutRecord,
    decode_record,
    encode_record,
)
from farfill.registry.store import Entry, Put, Store, StoreError, Unchanged

ATTEMPTS = 8
_ROLES = frozenset({Role.PREFILL, Role.DECODE})
ANY = "*"

ShareKey = tuple[str, str]
"""(model, tenant), ANY stands for all; or, of a worker version's rollout, (ROLE_MARK + role, version)."""
ROLE_MARK = "@"


@dataclass(frozen=True, slots=True)
class ShareChange:
    """What a share becomes. `sticky` None: as it was."""

    percent: float
    automatic: bool
    author: str
    reason: str
    unix_s: float
    sticky: str | None = None


def share_key(model: str, tenant: str) -> str:
    """The store's key."""
    return f"{ROLLOUT}{quote(model, safe='*')}/{quote(tenant, safe='*')}"


def version_share(role: Role, version: str) -> ShareKey:
    """The share of requests that go to workers of `role` and `version`."""
    return f"{ROLE_MARK}{role}", version


def version_share_of(key: ShareKey) -> tuple[Role, str] | None:
    """(role, version) of a worker version's share; None: it is another share."""
    role = key[0].removeprefix(ROLE_MARK)
    return (Role(role), key[1]) if key[0].startswith(ROLE_MARK) and role in _ROLES else None


def share_of(entry: Entry) -> tuple[ShareKey, RolloutRecord]:
    """Raises ProtocolError on an entry that is no share."""
    model, separator, tenant = entry.key.removeprefix(ROLLOUT).partition("/")
    if not separator:
        raise ProtocolError(f"{entry.key} is no rollout share", side="registry")
    return (unquote(model), unquote(tenant)), decode_record(entry.value, RolloutRecord)


async def change_share(
    store: Store, key: ShareKey, make: Callable[[RolloutRecord | None], ShareChange | None]
) -> RolloutRecord | None:
    """Set the share of `key` to what `make` says of the one it finds; None: leave it. Raises StoreError."""
    name = share_key(*key)
    for _ in range(ATTEMPTS):
        entry = await store.get(name)
        before = None if entry is None else decode_record(entry.value, RolloutRecord)
        change = make(before)
        if change is None:
            return None
        sticky = change.sticky or (before.sticky if before is not None else "session")
        after = RolloutRecord(
            version=1 if before is None else before.version + 1,
            percent=change.percent,
            sticky=sticky,
            automatic=change.automatic,
            author=change.author,
            reason=change.reason,
            unix_s=change.unix_s,
            salt="" if before is None else before.salt,
        )
        audit = AuditRecord(
            unix_s=change.unix_s,
            who=change.author,
            what=f"rollout {key[0]} {key[1]}: {_told(before)} -> {_told(after)}",
            why=change.reason,
        )
        puts = [Put(name, encode_record(after)), audit_put(audit)]
        if (await store.commit(puts, [Unchanged(name, 0 if entry is None else entry.modified)])).applied:
            await forget_old_audit(store)
            return after
    raise StoreError(f"{name}: written by several at once", reason="contended")


async def revert_all(store: Store, author: str, reason: str, unix_s: float) -> list[ShareKey]:
    """Nothing goes far any more: 0 % for all, and for every share set apart. Raises StoreError."""
    listing = await store.scan(ROLLOUT)
    found = (share_of(entry)[0] for entry in listing.entries)
    # Worker versions go back by themselves: which one serves says nothing of where.
    keys = sorted({(ANY, ANY), *(key for key in found if version_share_of(key) is None)})
    change = ShareChange(0.0, False, author, reason, unix_s)
    for key in keys:  # (*, *) comes first
        await change_share(store, key, lambda _: change)
    return keys


def _told(record: RolloutRecord | None) -> str:
    if record is None:
        return "unset"
    return f"{record.percent:g} %{', automatic' if record.automatic else ''}"
