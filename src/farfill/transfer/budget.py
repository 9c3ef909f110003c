"""Bounds the memory a decode worker spends on KV that is on its way.

Two bounds, of the same budget. Credit: each sender may have its share of the budget unacknowledged, and waits
otherwise; so a slow receiver slows its senders. Leases: memory for chunks that must be decoded before they go into the
slot is taken from the budget, and a connection that finds none does not read until some is free; so a sender that
ignores its credit gains nothing, and one that stalls holds its own share only.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

# A lease costs at least so much, however small: each has a place in lists, too.
MIN_LEASE_BYTES = 4096
# Used memory kept for leases to come.
MAX_FREE = 256


class ReceiveBudget:
    """Thread-safe. `chunk_bytes` is the largest chunk: every sender may have one on its way, whatever its share."""

    def __init__(self, total_bytes: int, chunk_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._chunk_bytes = chunk_bytes
        self._lock = Lock()
        self._waiting: set[Callable[[], None]] = set()
        self._peers = 1
        self._leased: dict[str, int] = {}
        self._free: list[bytearray] = []
        self._free_bytes = 0

    def share(self, peers: int) -> int:
        """Credit of each of `peers` senders, in bytes. Leases are shared alike from now on."""
        with self._lock:
            self._peers = max(1, peers)
            share, waiting = self._share, self._take_waiting()
        for retry in waiting:
            retry()
        return share

    @property
    def current_share(self) -> int:
        """What `share` told last."""
        with self._lock:
            return self._share

    @property
    def leased_bytes(self) -> int:
        """Memory in use; 0 when idle."""
        with self._lock:
            return sum(self._leased.values())

    def lease(self, peer: str, nbytes: int, retry: Callable[[], None] | None = None) -> bytearray | None:
        """Memory of at least `nbytes`, to be given back with `release`. None: none is free; `retry` is called once
        when that may have changed.
        """
        nbytes = max(nbytes, MIN_LEASE_BYTES)
        with self._lock:
            if not self._fits(peer, nbytes):
                if retry is not None:
                    self._waiting.add(retry)
                return None
            memory = self._recycled(nbytes) or bytearray(nbytes)
            self._leased[peer] = self._leased.get(peer, 0) + len(memory)
            return memory

    def release(self, peer: str, memory: bytearray) -> None:
        """The memory of one lease, once."""
        with self._lock:
            self._leased[peer] -= len(memory)
            if not self._leased[peer]:
                del self._leased[peer]
            self._free.append(memory)
            self._free_bytes += len(memory)
            if len(self._free) > MAX_FREE:
                self._forget(self._free[0])
            waiting = self._take_waiting()
        for retry in waiting:
            retry()

    def _take_waiting(self) -> set[Callable[[], None]]:
        waiting, self._waiting = self._waiting, set()
        return waiting

    @property
    def _share(self) -> int:
        return max(self._chunk_bytes, self._total_bytes // self._peers)

    def _fits(self, peer: str, nbytes: int) -> bool:
        mine, all_bytes = self._leased.get(peer, 0), sum(self._leased.values())
        return not all_bytes or (all_bytes + nbytes <= self._total_bytes and (not mine or mine + nbytes <= self._share))

    def _recycled(self, nbytes: int) -> bytearray | None:
        """A used one that is large enough and not wasteful; others make room until the budget holds."""
        fitting = [memory for memory in self._free if nbytes <= len(memory) <= 2 * nbytes]
        taken = min(fitting, key=len) if fitting else None
        if taken is not None and sum(self._leased.values()) + len(taken) <= self._total_bytes:
            self._forget(taken)
            return taken
        while self._free and sum(self._leased.values()) + self._free_bytes + nbytes > self._total_bytes:
            self._forget(self._free[0])
        return None

    def _forget(self, memory: bytearray) -> None:
        for position, other in enumerate(self._free):
            if other is memory:
                del self._free[position]
                break
        self._free_bytes -= len(memory)
