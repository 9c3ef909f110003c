"""What an engine's prefix cache holds, block by block, and the latest changes, numbered, for whoever wants to follow.

Keys are those of `kv.hashing.prefix_keys` with the tenant's salt alone, so gateways can compare prompts with them. A
follower that asks for changes older than those kept is told of the gap and takes a snapshot. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

KEPT_CHANGES = 65_536


class ChangeKind(StrEnum):
    """What happened to blocks."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Change number `seq`; `keys` is empty for `CLEARED`."""

    seq: int
    kind: ChangeKind
    keys: tuple[bytes, ...] = ()


class BlockLedger:
    """`chunk_tokens` is how many tokens a block stands for. `sparse`: a prompt can be continued after announced blocks
    only, whatever lies before them (models with windows or states)."""

    def __init__(self, chunk_tokens: int, *, sparse: bool, kept_changes: int = KEPT_CHANGES) -> None:
        self.chunk_tokens = chunk_tokens
        self.sparse = sparse
        self._held: dict[bytes, None] = {}
        self._changes: deque[BlockChange] = deque(maxlen=kept_changes)
        self._seq = 0
        self._followers: dict[int, Callable[[], None]] = {}
        self._next_follower = 0
        self._lock = threading.Lock()

    @property
    def seq(self) -> int:
        """Number of the latest change; 0 before the first."""
        return self._seq

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, keys: Iterable[bytes]) -> None:
        """These are there now. Those that were already change nothing."""
        with self._lock:
            fresh = tuple(key for key in dict.fromkeys(keys) if key not in self._held)
            self._held |= dict.fromkeys(fresh)
            self._note(ChangeKind.STORED, fresh)

    def removed(self, keys: Iterable[bytes]) -> None:
        """These are gone. Those that were not there change nothing."""
        with self._lock:
            gone = tuple(key for key in dict.fromkeys(keys) if key in self._held)
            for key in gone:
                del self._held[key]
            self._note(ChangeKind.REMOVED, gone)

    def cleared(self) -> None:
        """All are gone."""
        with self._lock:
            self._held.clear()
            self._seq += 1
            self._changes.append(BlockChange(self._seq, ChangeKind.CLEARED))
            self._wake()

    def snapshot(self) -> tuple[int, list[bytes]]:
        """(number of the latest change it includes, all blocks)."""
        with self._lock:
            return self._seq, list(self._held)

    def since(self, seq: int, limit: int) -> list[BlockChange] | None:
        """Changes after number `seq`, at most `limit`; None: some of them are not kept any more."""
        with self._lock:
            first = self._changes[0].seq if self._changes else self._seq + 1
            if not first - 1 <= seq <= self._seq:
                return None
            return list(islice(self._changes, seq + 1 - first, seq + 1 - first + limit))

    def follow(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each change, on whatever thread made it; it must not block. Returns how to stop."""
        with self._lock:
            number = self._next_follower
            self._next_follower += 1
            self._followers[number] = wake

        def stop() -> None:
            with self._lock:
                self._followers.pop(number, None)

        return stop

    def _note(self, kind: ChangeKind, keys: tuple[bytes, ...]) -> None:
        if keys:
            self._seq += 1
            self._changes.append(BlockChange(self._seq, kind, keys))
            self._wake()

    def _wake(self) -> None:
        for wake in self._followers.values():
            wake()
