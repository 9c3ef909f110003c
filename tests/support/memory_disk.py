"""A disk in memory that forgets what was not synced, and can lose power in the middle of any write."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

from farfill.registry.disk import SyncFailedError


class PowerLossError(BaseException):
    """Not an OSError: nothing that runs on the machine can handle it."""


@dataclass
class MemoryDisk:
    """Implements `registry.disk.Disk`. `files` is what is durable.

    `fuse` counts down with every durable step; at 0 power is lost, and `tear(data)` says what reached the disk of an
    append under way. `refuse` makes the next appends fail: "full" after half the data, "sync" at fsync.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    fuse: int | None = None
    tear: Callable[[bytes], bytes] = lambda data: b""
    refuse: str = ""
    steps: int = 0

    def after_power_loss(self) -> MemoryDisk:
        """The machine starts again."""
        return MemoryDisk(dict(self.files))

    def names(self) -> list[str]:
        return sorted(self.files)

    def read(self, name: str) -> bytes:
        return self.files[name]

    def append(self, name: str, data: bytes) -> None:
        if self._burn():
            self.files[name] += self.tear(data)
            raise PowerLossError
        if self.refuse == "full":
            self.files[name] += data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "no space left")
        self.files[name] += data
        if self.refuse == "sync":
            raise SyncFailedError(errno.EIO, "input/output error")

    def truncate(self, name: str, size: int) -> None:
        if self._burn():
            raise PowerLossError
        self.files[name] = self.files[name][:size]

    def publish(self, name: str, data: bytes) -> None:
        if self._burn():
            if self.tear(b"either") == b"either":  # the rename had reached the disk
                self.files[name] = data
            raise PowerLossError
        self.files[name] = data

    def remove(self, name: str) -> None:
        if self._burn():
            raise PowerLossError
        del self.files[name]

    def _burn(self) -> bool:
        self.steps += 1
        if self.fuse is None:
            return False
        self.fuse -= 1
        return self.fuse < 0
