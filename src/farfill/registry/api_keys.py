"""API keys: how they look, how their digests are made and compared, and changes of them in the store.

A key is `ff_ID_SECRET`: 12 letters or digits that name it in logs and commands, 43 that hold 256 random bits, and 6 of
a checksum, by which scanners of leaked secrets and the gateway tell a typing error from a wrong key. Only a digest is
kept. A slow hash would add nothing: nobody guesses 256 bits.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from farfill.core.errors import ConfigError, InvalidRequestError, ProtocolError
from farfill.registry.audit import audit_put, forget_old_audit
from farfill.registry.records import KEYS, AuditRecord, KeyRecord, decode_record, encode_record
from farfill.registry.store import Delete, Entry, Operation, Put, Store, StoreError, Unchanged

SCOPES = ("api", "admin", "monitor")
MIN_PEPPER_BYTES = 16
ATTEMPTS = 8
LAST_UNIX_S = 253_402_300_799.0
"""The end of the year 9999, which the calendar has no later one than."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_CHARS, _SECRET_CHARS, _SUM_CHARS = 12, 43, 6
_KEY = re.compile(rf"ff_([0-9A-Za-z]{{{_ID_CHARS}}})_([0-9A-Za-z]{{{_SECRET_CHARS}}})([0-9A-Za-z]{{{_SUM_CHARS}}})")


@dataclass(frozen=True, slots=True)
class KeyDigests:
    """Digests under `pepper`; without one they are plain SHA-256. Raises ConfigError on a short pepper."""

    pepper: bytes = b""

    def __post_init__(self) -> None:
        if self.pepper and len(self.pepper) < MIN_PEPPER_BYTES:
            raise ConfigError(f"access.pepper: has {len(self.pepper)} bytes; give at least {MIN_PEPPER_BYTES}")

    def digest(self, key: str) -> str:
        """As kept."""
        if self.pepper:
            return "hmac-sha256:" + hmac.new(self.pepper, key.encode(), hashlib.sha256).hexdigest()
        return "sha256:" + hashlib.sha256(key.encode()).hexdigest()

    def matches(self, key: str, record: KeyRecord, now_unix_s: float) -> bool:
        """Whether `key` is the record's present one, or its former one that still counts. In constant time."""
        found = self.digest(key)
        present = hmac.compare_digest(found, record.digest)
        former = hmac.compare_digest(found, record.former_digest or "-")
        return present or (former and now_unix_s < record.former_until_unix_s)


def new_key(key_id: str = "") -> tuple[str, str]:
    """(id, key): a new one, or another one of the same id."""
    key_id = key_id or "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))
    head = f"ff_{key_id}_" + "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET_CHARS))
    return key_id, head + _checksum(head)


def key_id(key: str) -> str | None:
    """The id in `key`; None when it is no key at all, or mistyped."""
    found = _KEY.fullmatch(key)
    if found is None or _checksum(key[:-_SUM_CHARS]) != found[3]:
        return None
    return found[1]


def key_of(entry: Entry) -> KeyRecord:
    """Raises ProtocolError on an entry that is no key, or one that makes no sense."""
    record = decode_record(entry.value, KeyRecord)
    if entry.key != KEYS + record.id:
        raise ProtocolError(f"{entry.key} holds the key {record.id}", side="registry")
    try:
        return check_key(record)
    except InvalidRequestError as error:
        raise ProtocolError(f"{entry.key}: {error}", side="registry") from error


def check_key(record: KeyRecord) -> KeyRecord:
    """`record`, when it makes sense. Raises InvalidRequestError naming the field."""
    if record.scope not in SCOPES:
        raise InvalidRequestError(f"scope is one of {', '.join(SCOPES)}, not {record.scope!r}", param="scope")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", record.tenant):
        raise InvalidRequestError(f"{record.tenant!r} is no tenant: letters, digits and ._-", param="tenant")
    if not re.fullmatch(r"[A-Za-z0-9._-]{0,64}", record.salt):
        raise InvalidRequestError("salt has up to 64 letters, digits and ._-", param="salt")
    if not record.name.isprintable() or len(record.name) > 128:
        raise InvalidRequestError("name has up to 128 printable characters", param="name")
    if not -100 <= record.priority <= 100:
        raise InvalidRequestError("priority is between -100 and 100", param="priority")
    if not record.models or not all(record.models):
        raise InvalidRequestError("name at least one model, or *", param="models")
    for field in ("requests_per_s", "tokens_per_s", "expires_unix_s"):
        if not 0 <= getattr(record, field) < float("inf"):
            raise InvalidRequestError(f"{field} must not be negative", param=field)
    if not 0 < record.burst_s <= 3600:
        raise InvalidRequestError("burst_s is more than 0 and at most 3600", param="burst_s")
    for text in record.allow_from:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise InvalidRequestError(f"{text!r} is no network: {error}", param="allow_from") from error
    return record


def check_new_key(record: KeyRecord) -> KeyRecord:
    """The same of one that is only to be made: it must not have expired by then, nor expire beyond the calendar."""
    check_key(record)
    expires = record.expires_unix_s
    if expires and not record.created_unix_s < expires <= LAST_UNIX_S:
        raise InvalidRequestError(
            f"expires_unix_s is 0 (never) or a Unix time in seconds between now ({record.created_unix_s:.0f})"
            f" and {LAST_UNIX_S:.0f}",
            param="expires_unix_s",
        )
    return record


async def list_keys(store: Store) -> list[KeyRecord]:
    """All of them, by id. Raises StoreError."""
    return [key_of(entry) for entry in (await store.scan(KEYS)).entries]


async def create_key(store: Store, record: KeyRecord, why: str = "") -> None:
    """Keep a new one. Raises StoreError, or InvalidRequestError when it makes no sense."""
    check_new_key(record)
    what = f"key {record.id} created: {told(record)}"
    if not await _commit(store, record.id, None, record, AuditRecord(
        unix_s=record.created_unix_s, who=record.author, what=what, why=why
    )):  # fmt: skip
        raise StoreError(f"there is a key {record.id} already", reason="contended")


async def change_key(
    store: Store, wanted: str, make: Callable[[KeyRecord], KeyRecord | None], audit: AuditRecord
) -> KeyRecord | None:
    """Make something else of a key, or remove it (None); returns what it was made.

    Raises InvalidRequestError when there is none of that id, StoreError.
    """
    for _ in range(ATTEMPTS):
        entry = await store.get(KEYS + wanted)
        if entry is None:
            raise InvalidRequestError(f"there is no key {wanted!r}", reason="not_found", param="id")
        after = make(key_of(entry))
        if await _commit(store, wanted, entry, after if after is None else check_key(after), audit):
            return after
    raise StoreError(f"{KEYS}{wanted}: written by several at once", reason="contended")


def rotated(record: KeyRecord, digest: str, overlap_s: float, now_unix_s: float) -> KeyRecord:
    """With a new digest; the present one counts for another `overlap_s`."""
    return msgspec.structs.replace(
        record,
        digest=digest,
        former_digest=record.digest if overlap_s > 0 else "",
        former_until_unix_s=now_unix_s + overlap_s if overlap_s > 0 else 0.0,
    )


def told(record: KeyRecord) -> str:
    """What it may do, for people. Nothing of its digest."""
    limits = [f"{record.requests_per_s:g} requests/s"] if record.requests_per_s else []
    limits += [f"{record.tokens_per_s:g} tokens/s"] if record.tokens_per_s else []
    return ", ".join([record.scope, f"tenant {record.tenant}", f"models {' '.join(record.models)}", *limits])


async def _commit(store: Store, wanted: str, before: Entry | None, after: KeyRecord | None, audit: AuditRecord) -> bool:
    key = KEYS + wanted
    change: Operation = Delete(key) if after is None else Put(key, encode_record(after))
    condition = Unchanged(key, 0 if before is None else before.modified)
    done = (await store.commit([change, audit_put(audit)], [condition])).applied
    if done:
        await forget_old_audit(store)
    return done


def _checksum(head: str) -> str:
    left, text = zlib.crc32(head.encode()), ""
    for _ in range(_SUM_CHARS):
        left, digit = divmod(left, len(_ALPHABET))
        text = _ALPHABET[digit] + text
    return text
