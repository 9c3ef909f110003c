"""API keys: their form, their digests, and changes of them in the registry and in a file."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.clock import WallClock
from farfill.core.errors import ConfigError, InvalidRequestError, ProtocolError
from farfill.registry.api_keys import LAST_UNIX_S, KeyDigests, check_key, key_id, key_of, new_key, rotated
from farfill.registry.audit import audit_log
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.key_file import KeyFile, read_key_file
from farfill.registry.key_store import FileKeyStore, KeyStore, RegistryKeyStore
from farfill.registry.records import KEYS, AuditRecord, KeyRecord, encode_record
from farfill.registry.store import Put, StoreError
from support.memory_disk import MemoryDisk

DIGESTS = KeyDigests(b"0123456789abcdef")


def record(key: str, **fields: object) -> KeyRecord:
    wanted = key_id(key)
    assert wanted is not None
    return KeyRecord(id=wanted, digest=DIGESTS.digest(key), author="somebody", **fields)  # type: ignore[arg-type]


def test_new_key_names_itself_and_is_never_the_same() -> None:
    keys = {new_key()[1] for _ in range(50)}
    assert len(keys) == 50
    for key in keys:
        assert len(key) == 3 + 12 + 1 + 43 + 6
        assert key[3:15] == key_id(key)


@given(position=st.integers(0, 64), character=st.sampled_from("0AZaz_-. \n"))
def test_mistyped_key_is_no_key(position: int, character: str) -> None:
    key = "ff_0123456789AB_" + "s" * 43 + "0mMQoC"
    key = new_key("0123456789AB")[1]
    typed = key[:position] + character + key[position + 1 :]
    assert (key_id(typed) is None) == (typed != key)


def test_digest_needs_the_pepper_and_a_short_one_is_refused() -> None:
    key = new_key()[1]
    found = record(key)
    assert DIGESTS.matches(key, found, 0)
    assert not KeyDigests(b"another pepper, long").matches(key, found, 0)
    assert not KeyDigests().matches(key, found, 0)
    assert key not in repr(found)
    assert key[16:] not in encode_record(found).decode("latin-1")
    with pytest.raises(ConfigError, match="at least 16"):
        KeyDigests(b"short")


def test_former_key_counts_until_its_time_is_over() -> None:
    first, second = new_key("0123456789AB")[1], new_key("0123456789AB")[1]
    after = rotated(record(first), DIGESTS.digest(second), overlap_s=60, now_unix_s=1000)
    assert DIGESTS.matches(second, after, 5000)
    assert DIGESTS.matches(first, after, 1059)
    assert not DIGESTS.matches(first, after, 1060)
    at_once = rotated(record(first), DIGESTS.digest(second), overlap_s=0, now_unix_s=1000)
    assert not DIGESTS.matches(first, at_once, 1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scope", "root"),
        ("tenant", "a:b"),
        ("tenant", ""),
        ("salt", "a~b"),
        ("name", "a\nb"),
        ("priority", -101),
        ("models", []),
        ("requests_per_s", -1.0),
        ("tokens_per_s", float("inf")),
        ("expires_unix_s", float("nan")),
        ("burst_s", 0.0),
        ("allow_from", ["10.0.0.1/8"]),
    ],
)
def test_key_that_makes_no_sense_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_key(msgspec.structs.replace(record(new_key()[1]), **{field: value}))
    assert caught.value.param == field


@pytest.mark.parametrize("expires", [1.0, 999.0, 1000.0, LAST_UNIX_S + 1, 1e12, 1e308])
async def test_key_that_has_expired_or_never_could_is_not_made(store: KeyStore, expires: float) -> None:
    kept = record(new_key()[1])
    await store.create(kept)
    with pytest.raises(InvalidRequestError, match="0 \\(never\\)") as caught:
        await store.create(record(new_key()[1], expires_unix_s=expires, created_unix_s=1000.0))
    assert caught.value.param == "expires_unix_s"
    assert await store.list() == [kept]


async def test_key_may_expire_up_to_the_calendars_end(store: KeyStore) -> None:
    for expires in (0.0, 1000.5, LAST_UNIX_S):
        await store.create(record(new_key()[1], expires_unix_s=expires, created_unix_s=1000.0))
    assert len(await store.list()) == 3


@pytest.fixture(params=["registry", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KeyStore]:
    if request.param == "file":
        yield FileKeyStore(KeyFile(tmp_path / "keys.json"))
        return
    async with EmbeddedStore(MemoryDisk(), WallClock()) as embedded:
        yield RegistryKeyStore(embedded)


def audit(what: str) -> AuditRecord:
    return AuditRecord(unix_s=2.0, who="me", what=what)


async def test_key_is_kept_changed_and_removed(store: KeyStore) -> None:
    found = record(new_key()[1], tenant="team")
    await store.create(found)
    assert await store.list() == [found]
    changed = await store.change(found.id, lambda r: msgspec.structs.replace(r, tenant="other"), audit("changed"))
    assert changed is not None
    assert (await store.list())[0].tenant == "other"
    with pytest.raises(InvalidRequestError):
        await store.change(found.id, lambda r: msgspec.structs.replace(r, tenant=":"), audit("spoilt"))
    assert (await store.list())[0].tenant == "other"
    assert await store.change(found.id, lambda _: None, audit("removed")) is None
    assert await store.list() == []
    with pytest.raises(InvalidRequestError, match="there is no key"):
        await store.change(found.id, lambda r: r, audit("again"))


async def test_every_change_is_in_the_audit_log_with_who_made_it() -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as embedded:
        store, key = RegistryKeyStore(embedded), new_key()[1]
        await store.create(record(key, created_unix_s=1.0), "for tests")
        await store.change(record(key).id, lambda _: None, audit("revoked"))
        lines = await audit_log(embedded)
    assert [(line.who, line.why) for line in lines] == [("somebody", "for tests"), ("me", "")]
    assert "created: api, tenant default, models *" in lines[0].what
    assert all(key[16:] not in line.what and "sha256" not in line.what for line in lines)


async def test_key_of_another_is_not_replaced() -> None:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as embedded:
        store, found = RegistryKeyStore(embedded), record(new_key()[1])
        await store.create(found)
        with pytest.raises(StoreError, match="already"):
            await store.create(found)
        misplaced = Put(KEYS + "other0000000", encode_record(found))
        await embedded.commit([misplaced])
        with pytest.raises(ProtocolError, match="holds the key"):
            key_of((await embedded.scan(KEYS + "other")).entries[0])


def test_file_is_private_at_first_and_keeps_its_mode_after(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    file = KeyFile(path)
    file.create(record(new_key()[1]))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    file.create(record(new_key()[1]), "second")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [line.why for line in file.audit()] == ["", "second"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 2}', '{"keys": [{"id": "x", "digest": "y", "scope": "z"}]}']
)
def test_file_with_mistakes_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"access.keys_file: .*keys.json"):
        read_key_file(path)


def test_file_holds_no_key(tmp_path: Path) -> None:
    key = new_key()[1]
    KeyFile(tmp_path / "keys.json").create(record(key))
    text = (tmp_path / "keys.json").read_text()
    assert key not in text
    assert json.loads(text)["keys"][0]["digest"].startswith("hmac-sha256:")
