"""The audit log in the store: who changed what, when and why. A line is written in the same commit as its change."""

from __future__ import annotations

import secrets

from farfill.registry.records import AUDIT, AuditRecord, decode_record, encode_record
from farfill.registry.store import Delete, Entry, Put, Store

AUDIT_KEPT = 200


def audit_put(record: AuditRecord) -> Put:
    """The line to commit with the change."""
    return Put(f"{AUDIT}{int(record.unix_s * 1000):014d}-{secrets.token_hex(4)}", encode_record(record))


async def audit_log(store: Store) -> list[AuditRecord]:
    """The latest changes, oldest first. Raises StoreError."""
    return [decode_record(entry.value, AuditRecord) for entry in await _lines(store)]


async def _lines(store: Store) -> list[Entry]:
    # By revision: clocks of those who change things differ, and two changes may fall into one millisecond.
    return sorted((await store.scan(AUDIT)).entries, key=lambda entry: entry.created)


async def forget_old_audit(store: Store) -> None:
    """Keep the latest lines. Raises StoreError."""
    entries = await _lines(store)
    old = entries[:-AUDIT_KEPT] if len(entries) > AUDIT_KEPT else ()
    if old:
        await store.commit([Delete(entry.key) for entry in old[:50]])
