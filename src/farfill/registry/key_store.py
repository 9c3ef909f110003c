"""Where API keys are kept, behind one door: the registry's store, or a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from farfill.registry.api_keys import change_key, create_key, list_keys
from farfill.registry.key_file import KeyFile
from farfill.registry.records import AuditRecord, KeyRecord
from farfill.registry.store import Store

Make = Callable[[KeyRecord], KeyRecord | None]


class KeyStore(Protocol):
    """Every change is audited with it. Raises StoreError or ConfigError when it cannot be had."""

    async def list(self) -> list[KeyRecord]: ...

    async def create(self, record: KeyRecord, why: str = "") -> None: ...

    async def change(self, wanted: str, make: Make, audit: AuditRecord) -> KeyRecord | None:
        """None from `make` removes it. Raises InvalidRequestError when there is none of that id."""
        ...


class RegistryKeyStore:
    """`store` is opened by whoever gives it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def list(self) -> list[KeyRecord]:
        """By id."""
        return await list_keys(self._store)

    async def create(self, record: KeyRecord, why: str = "") -> None:
        """A new one."""
        await create_key(self._store, record, why)

    async def change(self, wanted: str, make: Make, audit: AuditRecord) -> KeyRecord | None:
        """Another state, or none."""
        return await change_key(self._store, wanted, make, audit)


class FileKeyStore:
    """The same in a file; threads do the waiting."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file

    async def list(self) -> list[KeyRecord]:
        """By id."""
        return await asyncio.to_thread(self._file.list)

    async def audit(self) -> list[AuditRecord]:
        """Changes, which the registry does not know of."""
        return await asyncio.to_thread(self._file.audit)

    async def create(self, record: KeyRecord, why: str = "") -> None:
        """A new one."""
        await asyncio.to_thread(self._file.create, record, why)

    async def change(self, wanted: str, make: Make, audit: AuditRecord) -> KeyRecord | None:
        """Another state, or none."""
        return await asyncio.to_thread(self._file.change, wanted, make, audit)
