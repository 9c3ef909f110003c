"""The few file operations the embedded store is made of, each durable when it returns."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Protocol

from farfill.core.errors import ConfigError

_LOCK = "lock"
_TEMPORARY = ".tmp"


class SyncFailedError(OSError):
    """fsync failed: what is on the disk is unknown, and trying again would not tell."""


class Disk(Protocol):
    """One folder. Every method raises OSError."""

    def names(self) -> list[str]: ...

    def read(self, name: str) -> bytes: ...

    def append(self, name: str, data: bytes) -> None:
        """Durable on return. After OSError any part of `data` may be there; after SyncFailedError anything."""
        ...

    def truncate(self, name: str, size: int) -> None: ...

    def publish(self, name: str, data: bytes) -> None:
        """A whole file, there completely or not at all."""
        ...

    def remove(self, name: str) -> None: ...


class FolderDisk:
    """A folder of the file system, made if need be and locked against a second process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[str, int] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"registry.data_dir: {folder} cannot be used: {error.strerror}; give a folder the registry may write"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"registry.data_dir: {folder} is in use by another registry; stop it or give this one its own folder"
            ) from error
        self._sync_folder(folder.parent)
        for name in self.names():
            if name.endswith(_TEMPORARY):
                self.remove(name)

    def close(self) -> None:
        """Give the folder back."""
        self._close_open()
        os.close(self._lock)

    def names(self) -> list[str]:
        """All files but the lock, sorted."""
        return sorted(name for name in os.listdir(self._folder) if name != _LOCK)

    def read(self, name: str) -> bytes:
        """The whole file."""
        return (self._folder / name).read_bytes()

    def append(self, name: str, data: bytes) -> None:
        """At the end of an existing file."""
        if self._open is None or self._open[0] != name:
            self._close_open()
            handle = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._open = (name, handle)
        _write_all(self._open[1], data)
        _sync(self._open[1])

    def truncate(self, name: str, size: int) -> None:
        """Keep the first `size` bytes."""
        handle = os.open(self._folder / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, size)
            _sync(handle)
        finally:
            os.close(handle)

    def publish(self, name: str, data: bytes) -> None:
        """By way of a temporary file."""
        temporary = self._folder / (name + _TEMPORARY)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(handle, data)
            _sync(handle)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(handle)
        os.replace(temporary, self._folder / name)
        self._sync_folder(self._folder)

    def remove(self, name: str) -> None:
        """Delete a file."""
        os.unlink(self._folder / name)
        self._sync_folder(self._folder)

    def _close_open(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(handle)
        finally:
            os.close(handle)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        raise SyncFailedError(error.errno, error.strerror) from error
