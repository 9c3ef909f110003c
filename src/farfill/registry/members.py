"""Membership on top of a store: who is alive, and that a restarted worker replaces its former self for good.

Any number of registry processes may serve one store: a worker's lease stands in its entry, so each of them can
renew it, and every write is conditional on what was read.
"""

from __future__ import annotations

from typing import Literal

from farfill.core.cluster import Instance
from farfill.core.errors import ProtocolError
from farfill.registry.messages import from_message, to_message
from farfill.registry.mirror import Mirror
from farfill.registry.records import (
    GENERATIONS,
    INSTANCES,
    GenerationsRecord,
    InstanceRecord,
    decode_record,
    encode_record,
)
from farfill.registry.store import Delete, Entry, LeaseLostError, Operation, Put, Store, StoreError, Unchanged

REMEMBERED_GENERATIONS = 16
ATTEMPTS = 8

Outcome = Literal["registered", "renewed", "superseded"]


class Members:
    """`mirror` follows `INSTANCES` of the same store and answers reads."""

    def __init__(self, store: Store, mirror: Mirror, lease_s: float) -> None:
        self._store = store
        self._mirror = mirror
        self._lease_s = lease_s

    def instances(self) -> tuple[Instance, ...]:
        """All live instances, by name. What a newer version wrote and this one cannot read is left out."""
        found: list[Instance] = []
        for entry in self._mirror.entries():
            try:
                found.append(instance_of(entry))
            except ProtocolError:
                continue
        return tuple(found)

    async def put(self, instance: Instance) -> tuple[Outcome, float]:
        """Register or renew; (outcome, seconds it holds). Raises StoreError.

        Superseded: another generation of this name took over, nothing was changed.
        """
        entry = self._mirror.get(INSTANCES + instance.name)
        for _ in range(ATTEMPTS):
            done = await self._put(instance, entry)
            if done is not None:
                return done
            entry = await self._store.get(INSTANCES + instance.name)
        raise StoreError(f"{instance.name}: written by several processes at once", reason="contended")

    async def remove(self, name: str, generation: str) -> bool:
        """Take `name` off, if it still is of `generation`. Returns whether it was there."""
        for _ in range(ATTEMPTS):
            entry = await self._store.get(INSTANCES + name)
            if entry is None or instance_of(entry).generation != generation:
                return False
            if (await self._store.commit([Delete(entry.key)], [Unchanged(entry.key, entry.modified)])).applied:
                if entry.lease:
                    await self._store.revoke(entry.lease)
                return True
        raise StoreError(f"{name}: written by several processes at once", reason="contended")

    async def _put(self, instance: Instance, entry: Entry | None) -> tuple[Outcome, float] | None:
        """None: `entry` is not what the store has now."""
        held = None if entry is None else instance_of(entry)
        if entry is None or held is None or held.generation != instance.generation:
            return await self._register(instance, entry, held)
        try:
            ttl_s = await self._store.keep_alive(entry.lease)
            if held != instance:
                put = Put(entry.key, _value(instance), entry.lease)
                if not (await self._store.commit([put], [Unchanged(entry.key, entry.modified)])).applied:
                    return None
        except LeaseLostError:
            return None
        return "renewed", ttl_s

    async def _register(
        self, instance: Instance, entry: Entry | None, held: Instance | None
    ) -> tuple[Outcome, float] | None:
        former_key, key = GENERATIONS + instance.name, INSTANCES + instance.name
        former_entry = await self._store.get(former_key)
        former = [] if former_entry is None else decode_record(former_entry.value, GenerationsRecord).former
        if instance.generation in former:
            return "superseded", 0.0
        lease = await self._store.grant(self._lease_s)
        operations: list[Operation] = [Put(key, _value(instance), lease.id)]
        if held is not None:
            kept = [*former, held.generation][-REMEMBERED_GENERATIONS:]
            operations.append(Put(former_key, encode_record(GenerationsRecord(former=kept))))
        conditions = [
            Unchanged(key, 0 if entry is None else entry.modified),
            Unchanged(former_key, 0 if former_entry is None else former_entry.modified),
        ]
        if not (await self._store.commit(operations, conditions)).applied:
            await self._store.revoke(lease.id)
            return None
        if entry is not None and entry.lease:
            await self._store.revoke(entry.lease)
        return "registered", lease.ttl_s


def instance_of(entry: Entry) -> Instance:
    """Raises ProtocolError."""
    return from_message(decode_record(entry.value, InstanceRecord).instance)


def _value(instance: Instance) -> bytes:
    return encode_record(InstanceRecord(instance=to_message(instance)))
