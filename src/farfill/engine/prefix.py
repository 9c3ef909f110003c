"""Snapshots of KV at prefill-chunk boundaries, found again by the tokens before them, within a byte limit.

An entry is one chunk: the rows of every growing tensor and, where it was taken while the sequence stood exactly
at the chunk's end, the windows there. A hit is the longest chain of chunks from the prompt's start; models with
windows can only continue from an entry that has them. Snapshots are copies: nobody else's bytes are pinned.
Least recently used chains go first, their deepest chunk before its parents. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from farfill.core.layout import KVLayout, TensorKind
from farfill.engine.executor import SequenceKV
from farfill.engine.memory import allocate_bytes
from farfill.kv.hashing import prefix_keys


class _Entry:
    """One chunk's snapshot: `rows` and `windows` are all tensors of that kind, one after the other."""

    __slots__ = ("pins", "rows", "windows")

    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        self.rows = rows
        self.windows: npt.NDArray[np.uint8] | None = None
        self.pins = 0

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.windows is None else self.windows.nbytes)


class PrefixHit:
    """Chunks that need not be computed: KV of the first `tokens` tokens. Stays until `release` (idempotent)."""

    def __init__(self, cache: PrefixCache, entries: Sequence[_Entry]) -> None:
        self._cache = cache
        self._entries = tuple(entries)

    @property
    def tokens(self) -> int:
        """Prompt tokens covered."""
        return len(self._entries) * self._cache.layout.prefill_chunk_tokens

    def copy_into(self, kv: SequenceKV, start_token: int = 0) -> None:
        """Write rows from `start_token` (a chunk boundary) on into `kv`, and attach them."""
        layout, step = self._cache.layout, self._cache.layout.prefill_chunk_tokens
        for i, entry in enumerate(self._entries):
            if i * step < start_token:
                continue
            offset = 0
            for tensor, start, end in row_spans(layout, i):
                offset = _write(kv.place(tensor, start, end), entry.rows, offset)
        windows = self._entries[-1].windows if self._entries else None
        if windows is not None:
            offset = 0
            for tensor, start, end in window_spans(layout, self.tokens):
                offset = _write(kv.place(tensor, start, end), windows, offset)
        kv.attach(self.tokens)

    def release(self) -> None:
        """Let the entries go."""
        self._cache.unpin(self._entries)
        self._entries = ()


class PrefixCache:
    """All snapshots of one engine. `limit_bytes` 0 keeps none."""

    def __init__(self, layout: KVLayout, limit_bytes: int, salt: str) -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self._salt = salt
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._has_windows = any(t.kind is TensorKind.WINDOW for t in layout.tensors)

    @property
    def used_bytes(self) -> int:
        """Bytes of all snapshots."""
        return self._used_bytes

    def keys(self, prompt: Sequence[int], salt: str) -> tuple[bytes, ...]:
        """The chain of keys of `prompt[:-1]`; empty when the cache is off."""
        if not self.limit_bytes:
            return ()
        # The tenant's salt comes last and whole, so no tenant can spell another's.
        return prefix_keys(prompt[:-1], self.layout.prefill_chunk_tokens, f"{self._salt}\0{salt}")

    def find(self, keys: Sequence[bytes]) -> PrefixHit | None:
        """The longest usable chain, pinned, or None."""
        with self._lock:
            chain: list[_Entry] = []
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    break
                chain.append(entry)
            while chain and self._has_windows and chain[-1].windows is None:
                chain.pop()
            if not chain:
                return None
            self._touch(keys[: len(chain)])
            for entry in chain:
                entry.pins += 1
            return PrefixHit(self, chain)

    def insert(self, keys: Sequence[bytes], chunk: int, kv: SequenceKV) -> bool:
        """Snapshot `chunk` of the chain `keys` from `kv`; False when it does not fit or is there already."""
        chain = keys[: chunk + 1]
        boundary = (chunk + 1) * self.layout.prefill_chunk_tokens
        with self._lock:
            entry = self._entries.get(chain[-1])
            want_windows = self._has_windows and kv.tokens == boundary and (entry is None or entry.windows is None)
            if entry is not None and not want_windows:
                self._touch(chain)
                return False
            rows = [] if entry else row_spans(self.layout, chunk)
            windows = window_spans(self.layout, boundary) if want_windows else []
            nbytes = sum((end - start) * self.layout.tensors[t].row_bytes for t, start, end in (*rows, *windows))
            if not self._make_room(nbytes, frozenset(chain)):
                return False
            if entry is None:
                entry = self._entries[chain[-1]] = _Entry(_snapshot(kv, rows))
            if want_windows:
                entry.windows = _snapshot(kv, windows)
            self._used_bytes += nbytes
            self._touch(chain)
            return True

    def unpin(self, entries: Sequence[_Entry]) -> None:
        """Undo one `find`."""
        with self._lock:
            for entry in entries:
                entry.pins -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError when the account is wrong or beyond the limit."""
        with self._lock:
            total = sum(entry.nbytes for entry in self._entries.values())
            assert total == self._used_bytes, f"entries add up to {total} bytes, {self._used_bytes} are accounted"
            assert total <= self.limit_bytes, f"{total} bytes of snapshots, the limit is {self.limit_bytes}"

    def pinned(self) -> int:
        """Pins not yet released; 0 while idle."""
        with self._lock:
            return sum(entry.pins for entry in self._entries.values())

    def _touch(self, chain: Sequence[bytes]) -> None:
        for key in reversed(chain):
            if key in self._entries:
                self._entries.move_to_end(key)

    def _make_room(self, nbytes: int, keep: frozenset[bytes]) -> bool:
        if nbytes > self.limit_bytes:
            return False
        excess = self._used_bytes + nbytes - self.limit_bytes
        victims: list[bytes] = []
        for key, entry in self._entries.items():
            if excess <= 0:
                break
            if key not in keep and not entry.pins:
                victims.append(key)
                excess -= entry.nbytes
        if excess > 0:
            return False
        for key in victims:
            self._used_bytes -= self._entries.pop(key).nbytes
        return True


def row_spans(layout: KVLayout, chunk: int) -> list[tuple[int, int, int]]:
    """(tensor, start, end) of every growing tensor's rows in a whole prefill chunk."""
    step = layout.prefill_chunk_tokens
    return [(i, chunk * step, (chunk + 1) * step) for i, t in enumerate(layout.tensors) if t.kind.grows]


def window_spans(layout: KVLayout, tokens: int) -> list[tuple[int, int, int]]:
    """(tensor, start, end) of every window's rows after `tokens` tokens."""
    return [
        (i, max(0, tokens - t.window_tokens), tokens)
        for i, t in enumerate(layout.tensors)
        if t.kind is TensorKind.WINDOW
    ]


def _snapshot(kv: SequenceKV, spans: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.uint8]:
    views = [kv.read(*span) for span in spans]
    out = allocate_bytes(sum(view.nbytes for view in views))
    offset = 0
    for view in views:
        out[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
        offset += view.nbytes
    return out


def _write(place: memoryview, source: npt.NDArray[np.uint8], offset: int) -> int:
    end = offset + place.nbytes
    np.frombuffer(place, np.uint8)[:] = source[offset:end]
    return end
