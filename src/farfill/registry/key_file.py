"""API keys in a file, for gateways that are to depend on nothing: the same records, and who changed them.

It is replaced as a whole, so that a reader never sees half of it; writers exclude each other by a lock beside it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.registry.api_keys import check_key, check_new_key, told
from farfill.registry.audit import AUDIT_KEPT
from farfill.registry.records import AuditRecord, KeyRecord

MAX_BYTES = 64 << 20


class KeyFileContent(msgspec.Struct, kw_only=True):
    """The JSON in it."""

    version: int = 1
    keys: list[KeyRecord] = []
    audit: list[AuditRecord] = []


def read_key_file(path: Path) -> KeyFileContent:
    """Raises ConfigError when it is missing, or no such file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"access.keys_file: {path} does not exist; make a key: farfill keys create") from None
    except OSError as error:
        raise ConfigError(f"access.keys_file: {path} cannot be read: {error.strerror}") from error
    try:
        content = msgspec.json.decode(data[: MAX_BYTES + 1], type=KeyFileContent)
        for record in content.keys:
            check_key(record)
    except (msgspec.DecodeError, InvalidRequestError) as error:
        raise ConfigError(f"access.keys_file: {path} is no file of keys: {error}") from error
    if content.version != 1:
        raise ConfigError(f"access.keys_file: {path} has version {content.version}, this program reads 1")
    return content


class KeyFile:
    """Changes of the file at `path`, which the first key makes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def list(self) -> list[KeyRecord]:
        """All keys, by id. Raises ConfigError."""
        return sorted(read_key_file(self._path).keys, key=lambda record: record.id)

    def audit(self) -> list[AuditRecord]:
        """The latest changes, oldest first. Raises ConfigError."""
        return read_key_file(self._path).audit

    def create(self, record: KeyRecord, why: str = "") -> None:
        """Keep a new one. Raises ConfigError, or InvalidRequestError when it makes no sense."""
        check_new_key(record)
        what = f"key {record.id} created: {told(record)}"
        audit = AuditRecord(unix_s=record.created_unix_s, who=record.author, what=what, why=why)
        with self._changing() as content:
            content.keys.append(record)
            content.audit.append(audit)

    def change(
        self, wanted: str, make: Callable[[KeyRecord], KeyRecord | None], audit: AuditRecord
    ) -> KeyRecord | None:
        """As `api_keys.change_key`."""
        with self._changing() as content:
            before = next((record for record in content.keys if record.id == wanted), None)
            if before is None:
                raise InvalidRequestError(f"there is no key {wanted!r}", reason="not_found", param="id")
            after = make(before)
            content.keys.remove(before)
            if after is not None:
                content.keys.append(check_key(after))
            content.audit.append(audit)
        return after

    @contextmanager
    def _changing(self) -> Iterator[KeyFileContent]:
        try:
            lock = os.open(self._path.with_name(self._path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"access.keys_file: {self._path.parent} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = read_key_file(self._path) if self._path.exists() else KeyFileContent()
            yield content
            content.audit = content.audit[-AUDIT_KEPT:]
            self._write(msgspec.json.format(msgspec.json.encode(content)))
        finally:
            os.close(lock)

    def _write(self, data: bytes) -> None:
        try:
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            with os.fdopen(handle, "wb") as file:
                if self._path.exists():  # whoever may read it goes on to
                    os.fchmod(handle, self._path.stat().st_mode & 0o777)
                file.write(data)
                file.flush()
                os.fsync(handle)
            os.replace(name, self._path)
        except OSError as error:
            raise ConfigError(f"access.keys_file: {self._path} cannot be written: {error.strerror}") from error
