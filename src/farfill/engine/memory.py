"""KV memory by the byte: every hold has an owner, the sum never passes the bound, giving back is idempotent.

Buffers come straight from the operating system and return to it when the last view is gone, so a worker's
memory follows its load. A buffer is never reused: a late reader sees stale bytes, never another request's.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from farfill.core.errors import CapacityError, InvalidRequestError

_PAGES_FROM_BYTES = 1 << 16
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_PRIVATE = 0 if sys.platform == "win32" else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Owner(Protocol):
    """Who answers for a hold: a job, a slot or an export."""

    @property
    def live(self) -> bool:
        """False once it must not hold KV any more."""
        ...

    @property
    def filled_bytes(self) -> int:
        """Bytes of its hold that have KV of tokens in them by now."""
        ...


class Hold:
    """Bytes taken from a `KVMemory`. `owner` may change hands; `release` is idempotent."""

    def __init__(self, memory: KVMemory, owner: Owner, nbytes: int) -> None:
        self._memory = memory
        self.owner = owner
        self.nbytes = nbytes

    def grow(self, nbytes: int) -> None:
        """Take `nbytes` more or raise CapacityError (reason kv_memory)."""
        self._memory.take_more(self, nbytes)

    def release(self) -> None:
        """Give everything back."""
        self._memory.give_back(self, self.nbytes)

    def shrink(self, nbytes: int) -> None:
        """Give part of it back."""
        self._memory.give_back(self, nbytes)


class KVMemory:
    """The budget of all sequences. Safe from any thread."""

    def __init__(self, total_bytes: int, on_release: Callable[[], None] = lambda: None) -> None:
        self.total_bytes = total_bytes
        self.on_release = on_release
        self._holds: set[Hold] = set()
        self._used_bytes = 0
        self._most_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes held now."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes nobody holds."""
        return self.total_bytes - self._used_bytes

    @property
    def most_bytes(self) -> int:
        """The most that was ever held at once."""
        return self._most_bytes

    @property
    def filled_bytes(self) -> int:
        """Bytes held that have KV of tokens in them; the rest is room for tokens to come."""
        with self._lock:
            return sum(min(hold.nbytes, hold.owner.filled_bytes) for hold in self._holds)

    def require_possible(self, nbytes: int) -> None:
        """Raise InvalidRequestError when even an empty memory could not hold `nbytes`."""
        if nbytes > self.total_bytes:
            raise InvalidRequestError(
                f"the request needs {nbytes} bytes of KV cache, the worker has {self.total_bytes}", param="max_tokens"
            )

    def hold(self, owner: Owner, nbytes: int) -> Hold:
        """Take `nbytes` or raise CapacityError (reason kv_memory)."""
        hold = Hold(self, owner, 0)
        self.take_more(hold, nbytes)
        return hold

    def take_more(self, hold: Hold, nbytes: int) -> None:
        """Add `nbytes` to a hold or raise CapacityError (reason kv_memory)."""
        with self._lock:
            if nbytes > self.free_bytes:
                raise CapacityError(f"{nbytes} bytes of KV cache wanted, {self.free_bytes} free", reason="kv_memory")
            hold.nbytes += nbytes
            self._holds.add(hold)
            self._used_bytes += nbytes
            self._most_bytes = max(self._most_bytes, self._used_bytes)

    def give_back(self, hold: Hold, nbytes: int) -> None:
        """Return part or all of a hold; more than it has left counts as all."""
        with self._lock:
            nbytes = min(nbytes, hold.nbytes)
            hold.nbytes -= nbytes
            self._used_bytes -= nbytes
            if hold.nbytes == 0:
                self._holds.discard(hold)
        if nbytes:
            self.on_release()

    def check_integrity(self) -> None:
        """Raise AssertionError when a hold has no live owner or the sum is wrong."""
        with self._lock:
            orphans = [hold for hold in self._holds if not hold.owner.live]
            assert not orphans, f"{sum(h.nbytes for h in orphans)} bytes of KV are held by finished work"
            total = sum(hold.nbytes for hold in self._holds)
            assert total == self._used_bytes, f"holds add up to {total} bytes, {self._used_bytes} are accounted"


def allocate_bytes(nbytes: int, *, dense: bool = False) -> npt.NDArray[np.uint8]:
    """A writable buffer; large ones are pages of their own, untouched pages cost nothing.

    `dense`: all of it will be written, so pages may be large, which makes the first write several times as fast.
    """
    if nbytes < _PAGES_FROM_BYTES:
        return np.zeros(nbytes, np.uint8)
    pages = mmap.mmap(-1, nbytes) if sys.platform == "win32" else mmap.mmap(-1, nbytes, flags=_PRIVATE)
    if dense and _HUGE is not None:
        # A kernel without large pages refuses; small ones do as well.
        with contextlib.suppress(OSError):
            pages.madvise(_HUGE)
    return np.frombuffer(pages, np.uint8)
