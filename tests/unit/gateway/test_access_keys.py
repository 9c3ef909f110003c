"""Keys in a file: followed while the gateway runs; a file with mistakes changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from farfill.clock import WallClock
from farfill.core.errors import ConfigError
from farfill.gateway import access_keys
from farfill.gateway.access_keys import FileKeys, RegistryKeys
from farfill.registry.api_keys import KeyDigests, new_key
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.key_file import KeyFile
from farfill.registry.records import KEYS, KeyRecord, encode_record
from farfill.registry.store import Delete, Put
from support.memory_disk import MemoryDisk

DEADLINE_S = 20.0


def record(**fields: object) -> KeyRecord:
    key_id, key = new_key()
    return KeyRecord(id=key_id, digest=KeyDigests().digest(key), **fields)  # type: ignore[arg-type]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_file_is_followed_and_one_with_mistakes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_keys, "PERIOD_S", 0.01)
    path, counts = tmp_path / "keys.json", list[int]()
    first, second = record(), record()
    KeyFile(path).create(first)
    async with FileKeys(path, counts.append) as keys:
        assert keys.get(first.id) == first
        KeyFile(path).create(second)
        await until(lambda: keys.get(second.id) == second)
        good = path.read_text()
        path.write_text("{")
        keys.reload()
        assert {r.id for r in keys.records()} == {first.id, second.id}
        path.unlink()
        keys.reload()
        assert keys.get(first.id) == first
        path.write_text(good.replace(first.id, "ABCDEFGHIJKL"))
        await until(lambda: keys.get(first.id) is None)
    assert counts[0] == 1
    assert set(counts) == {1, 2}


async def test_missing_file_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="farfill keys create"):
        async with FileKeys(tmp_path / "absent.json"):
            pass


async def test_registry_is_followed_and_what_cannot_be_read_does_not_count() -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as store, RegistryKeys(store) as keys:
        first = record()
        await store.commit([Put(KEYS + first.id, encode_record(first)), Put(KEYS + "bad", b"\xff")])
        await until(lambda: keys.get(first.id) == first)
        assert keys.known
        assert [r.id for r in keys.records()] == [first.id]
        await store.commit([Delete(KEYS + first.id)])
        await until(lambda: keys.get(first.id) is None)
