"""Versions of the cluster file in the store: who wrote each, when, why, and which one is in force.

A version is never changed. Going back to one makes a new version with its text, so that history only grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from farfill.core.errors import InvalidRequestError
from farfill.registry.audit import audit_put, forget_old_audit
from farfill.registry.records import CONFIG, AuditRecord, ConfigRecord, decode_record, encode_record
from farfill.registry.store import MAX_VALUE_BYTES, Delete, Operation, Put, Store, StoreError, Unchanged

CURRENT = f"{CONFIG}current"
VERSIONS = f"{CONFIG}v/"
KEPT_VERSIONS = 100
MAX_TEXT_BYTES = MAX_VALUE_BYTES - 4096
ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """`text` is a valid cluster file; `what` says for the audit log what it changes."""

    text: str
    author: str
    reason: str
    unix_s: float
    what: str


async def current_config(store: Store) -> ConfigRecord | None:
    """What is in force; None: each gateway's own file. Raises StoreError."""
    entry = await store.get(CURRENT)
    return None if entry is None else decode_record(entry.value, ConfigRecord)


async def config_history(store: Store) -> list[ConfigRecord]:
    """The versions kept, oldest first. Raises StoreError."""
    return [decode_record(entry.value, ConfigRecord) for entry in (await store.scan(VERSIONS)).entries]


async def config_version(store: Store, version: int) -> ConfigRecord:
    """Raises InvalidRequestError when it is not kept (any more), StoreError."""
    entry = await store.get(_key(version))
    if entry is None:
        known = [record.version for record in await config_history(store)]
        told = f"{known[0]} to {known[-1]}" if known else "none yet"
        raise InvalidRequestError(f"there is no configuration version {version}; kept are {told}", param="version")
    return decode_record(entry.value, ConfigRecord)


async def put_config(store: Store, change: ConfigChange) -> ConfigRecord:
    """Put `change` in force as a new version; the one in force stays when it has the same text. Raises StoreError."""
    if len(change.text.encode()) > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"a cluster file in the registry has at most {MAX_TEXT_BYTES} bytes", param="file")
    for _ in range(ATTEMPTS):
        entry = await store.get(CURRENT)
        before = None if entry is None else decode_record(entry.value, ConfigRecord)
        if before is not None and before.text == change.text:
            return before
        record = ConfigRecord(
            version=1 if before is None else before.version + 1,
            text=change.text,
            author=change.author,
            reason=change.reason,
            unix_s=change.unix_s,
            previous=0 if before is None else before.version,
        )
        audit = AuditRecord(
            unix_s=change.unix_s,
            who=change.author,
            what=f"config {record.previous} -> {record.version}: {change.what}",
            why=change.reason,
        )
        value = encode_record(record)
        puts: list[Operation] = [Put(CURRENT, value), Put(_key(record.version), value), audit_put(audit)]
        if record.version > KEPT_VERSIONS:
            puts.append(Delete(_key(record.version - KEPT_VERSIONS)))
        if (await store.commit(puts, [Unchanged(CURRENT, 0 if entry is None else entry.modified)])).applied:
            await forget_old_audit(store)
            return record
    raise StoreError("the configuration is written by several at once", reason="contended")


def _key(version: int) -> str:
    return f"{VERSIONS}{version:010d}"
