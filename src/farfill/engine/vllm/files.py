"""Shared memory of requests: files in a private folder under /dev/shm, bounded in sum, mapped here and inside vLLM."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from threading import Lock

from farfill.core.errors import CapacityError, InvalidRequestError
from farfill.engine.vllm.messages import piece_offsets
from farfill.kv.manifest import Manifest

_PREFIX = "farfill-vllm-"


class KVFolder:
    """Owns the folder and the budget. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._lock = Lock()
        self._used = 0
        self._open: set[str] = set()
        shared = Path("/dev/shm")  # noqa: S108 (the kernel's own; the folder in it is private)
        _remove_orphans(shared)
        base = str(shared) if shared.is_dir() else None
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))

    @property
    def used_bytes(self) -> int:
        """Bytes of files that are open."""
        return self._used

    def open(self, manifest: Manifest) -> KVFile:
        """A file for all pieces. Raises CapacityError (kv_memory) when the budget is used up."""
        offsets, nbytes = piece_offsets(manifest)
        if nbytes > self._budget:
            raise InvalidRequestError(
                f"the prompt's KV needs {nbytes} bytes on this host, all there is are {self._budget}: raise"
                " engine.kv_cache_mb",
                param="prompt",
            )
        with self._lock:
            if self._used + nbytes > self._budget:
                raise CapacityError("no shared memory is left for another prompt's KV", reason="kv_memory")
            self._used += nbytes
            key = secrets.token_hex(8)
            self._open.add(key)
        try:
            return KVFile(self, self.path / key, manifest, offsets, nbytes)
        except OSError as error:
            self.give_back(key, nbytes)
            raise CapacityError(f"no shared memory for another prompt's KV: {error}", reason="kv_memory") from error

    def give_back(self, key: str, nbytes: int) -> None:
        """File `key` of so many bytes is gone."""
        with self._lock:
            self._used -= nbytes
            self._open.remove(key)

    def orphans(self) -> list[str]:
        """Files of requests that are over, still there."""
        with self._lock:
            return [
                name for name in os.listdir(self.path) if _is_key(name) and name.partition(".")[0] not in self._open
            ]

    def close(self) -> None:
        """Remove the folder and all that is left in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


class KVFile:
    """One request's pieces. Also the `KVSlot` of a generation to come."""

    def __init__(self, folder: KVFolder, path: Path, manifest: Manifest, offsets: list[int], nbytes: int) -> None:
        self._folder = folder
        self._offsets = offsets
        self._lock = Lock()
        self._open = True
        self.path = path
        self.manifest = manifest
        self.nbytes = nbytes
        self.held: frozenset[int] = frozenset()
        self.owner: object = self
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Really there, or an error now: a write to a page that is not there later would end the process.
            os.posix_fallocate(descriptor, 0, nbytes)
            self._memory = mmap.mmap(descriptor, nbytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    @property
    def key(self) -> str:
        """Names it in messages."""
        return self.path.name

    def buffer(self, piece: int) -> memoryview:
        """The writable place of piece `piece`."""
        start = self._offsets[piece]
        return memoryview(self._memory)[start : start + self.manifest.pieces[piece].nbytes]

    def release(self) -> None:
        """Remove it. Views that others still have stay readable. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):  # a view is left: the mapping goes with it
            self._memory.close()
        self._folder.give_back(self.key, self.nbytes)


def folder_problem(folder: str) -> str:
    """Why `folder`, named by somebody else, cannot be a `KVFolder` of this user; empty when it can.

    Who may ask vLLM for tokens must not be able to have KV written where others read it.
    """
    if os.path.realpath(folder) != folder or not os.path.basename(folder).startswith(_PREFIX):
        return "not a folder of a Farfill worker"
    try:
        found = os.stat(folder)
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return "not a folder private to the user that vLLM runs as"
    return ""


def _is_key(name: str) -> bool:
    head, _, _ = name.partition(".")
    return len(head) == 16 and all(char in "0123456789abcdef" for char in head)


def _remove_orphans(shared: Path) -> None:
    """Folders of engines that were killed."""
    for folder in shared.glob(f"{_PREFIX}*-*") if shared.is_dir() else ():
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
