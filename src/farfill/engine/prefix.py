"""Snapshots of KV at prefill-chunk boundaries, found again by the tokens before them, within a byte limit.

An entry is one chunk: the rows of every growing tensor and, where it was taken while the sequence stood exactly at
the chunk's end, the windows and states there. A hit is the longest chain of chunks from the prompt's start; models
with windows or states can only continue from an entry that has them, so their hits end at one. Snapshots are copies:
nobody else's bytes are pinned. `ledger` tells which chunks a prompt can be continued after. What is dropped first, and
for how long things stay, is `engine.retention`'s to say. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from farfill.clock import Clock, WallClock
from farfill.core.layout import KVLayout
from farfill.engine.blocks import BlockLedger
from farfill.engine.checkpoints import ReadState
from farfill.engine.executor import SequenceKV
from farfill.engine.memory import allocate_bytes
from farfill.engine.retention import Keep, Part, Retention, chunk_cost
from farfill.kv.hashing import KeyMaterial, prefix_keys

Span = tuple[int, int, int]


class _Entry:
    """One chunk's snapshot: `rows` and `states` are all tensors of that kind, one after the other."""

    __slots__ = ("key", "parent", "pins", "rows", "rows_part", "states", "states_part")

    def __init__(self, key: bytes, parent: bytes | None, rows: npt.NDArray[np.uint8]) -> None:
        self.key = key
        self.parent = parent
        self.pins = 0
        self.rows = rows
        self.states: npt.NDArray[np.uint8] | None = None
        self.rows_part: Part | None = None
        self.states_part: Part | None = None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (0 if self.states is None else self.states.nbytes)


class PrefixHit:
    """Chunks that need not be computed: KV of the first `tokens` tokens. Stays until `release` (idempotent)."""

    def __init__(self, cache: PrefixCache, entries: Sequence[_Entry]) -> None:
        self._cache = cache
        self._entries = tuple(entries)
        self.tokens = len(entries) * cache.layout.prefill_chunk_tokens

    def copy_rows(self, kv: SequenceKV, chunk: int) -> int:
        """Write one chunk's rows into their places in `kv`; how many bytes."""
        rows, offset = self._entries[chunk].rows, 0
        for span in row_spans(self._cache.layout, chunk):
            offset = _write(kv.place(*span), rows, offset)
        return offset

    def copy_states(self, kv: SequenceKV) -> None:
        """Write the windows and states at the end into their places in `kv`."""
        for tensor, start, end in state_spans(self._cache.layout, self.tokens):
            kv.place(tensor, start, end)[:] = self.read(tensor, start, end)

    def read(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """A window or state as it was at `end_token`, a chunk boundary that has some."""
        layout = self._cache.layout
        states = self._entries[end_token // layout.prefill_chunk_tokens - 1].states
        assert states is not None, f"no windows or states were kept at token {end_token}"
        offset = 0
        for span in state_spans(layout, end_token):
            nbytes = _span_bytes(layout, span)
            if span == (tensor, start_token, end_token):
                return states[offset : offset + nbytes].data.toreadonly()
            offset += nbytes
        raise AssertionError(f"tensor {tensor} keeps no tokens {start_token} to {end_token}")

    def release(self) -> None:
        """Let the entries go."""
        self._cache.unpin(self._entries)
        self._entries = ()


class PrefixCache:
    """All snapshots of one engine. `limit_bytes` 0 keeps none; `ttl_s` 0 keeps them however long they lie unused."""

    def __init__(self, layout: KVLayout, limit_bytes: int, *, ttl_s: float = 0.0, clock: Clock | None = None) -> None:
        self.layout = layout
        self.limit_bytes = limit_bytes
        self.ledger = BlockLedger(layout.prefill_chunk_tokens, sparse=not layout.resumable)
        self._clock = clock or WallClock()
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}
        self._retention = Retention(limit_bytes, ttl_s)
        self._used_bytes = 0
        self._coming_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of all snapshots."""
        return self._used_bytes

    @property
    def evicted(self) -> tuple[int, int]:
        """(parts dropped for room, parts dropped because nobody used them in time), since the start."""
        return self._retention.evicted_for_room, self._retention.evicted_by_age

    def keys(
        self, prompt: Sequence[int], salt: str, adapter: str = "", media: Sequence[KeyMaterial] = ()
    ) -> tuple[bytes, ...]:
        """The chain of keys of `prompt[:-1]`; empty when the cache is off.

        `media`: (first token, digest) of everything that is not text; `adapter` names weights added to the model's.
        Without one they are the very keys gateways know prompts by.
        """
        if not self.limit_bytes:
            return ()
        # The tenant's salt comes last and whole, so no tenant can spell another's; none begins with a zero.
        salted = f"\0{adapter}\0{salt}" if adapter else salt
        return prefix_keys(prompt[:-1], self.layout.prefill_chunk_tokens, salted, media)

    def find(self, keys: Sequence[bytes], *, every_checkpoint: bool = False) -> PrefixHit | None:
        """The longest usable chain, pinned, or None. `every_checkpoint`: it has windows and states at all of them."""
        with self._lock:
            chain: list[_Entry] = []
            for key in keys:
                entry = self._entries.get(key)
                if entry is None or (every_checkpoint and entry.states is None and self._is_checkpoint(len(chain))):
                    break
                chain.append(entry)
            while chain and not self.layout.resumable and chain[-1].states is None:
                chain.pop()
            if not chain:
                return None
            self._touch(keys[: len(chain)])
            for entry in chain:
                entry.pins += 1
            return PrefixHit(self, chain)

    def insert(self, keys: Sequence[bytes], chunk: int, kv: SequenceKV, read_states: ReadState | None = None) -> bool:
        """Snapshot `chunk` of the chain `keys` from `kv`; False when it does not fit or is there already.

        Windows and states at its end come from `read_states`, else from `kv` if that stands there.
        """
        key, boundary = keys[chunk], (chunk + 1) * self.layout.prefill_chunk_tokens
        with self._lock:
            entry = self._entries.get(key)
            if read_states is None and kv.tokens == boundary:
                read_states = kv.read
            want_states = (
                not self.layout.resumable and read_states is not None and (entry is None or entry.states is None)
            )
            if entry is not None and not want_states:
                self._touch(keys[: chunk + 1])
                return False
            rows = [] if entry else row_spans(self.layout, chunk)
            states = state_spans(self.layout, boundary) if want_states else []
            nbytes = sum(_span_bytes(self.layout, span) for span in (*rows, *states))
            if not self._make_room(nbytes, frozenset(keys[: chunk + 1])):
                return False
            self._used_bytes += nbytes
            self._coming_bytes += nbytes
            if entry is not None:
                entry.pins += 1
        # Others may look things up while bytes are copied.
        new_rows = None if entry else _snapshot(kv.read, self.layout, rows)
        new_states = _snapshot(read_states, self.layout, states) if want_states and read_states is not None else None
        with self._lock:
            self._coming_bytes -= nbytes
            if entry is not None:
                entry.pins -= 1
            self._publish(entry, keys, chunk, new_rows, new_states)
            self._touch(keys[: chunk + 1])
        return True

    @property
    def pinned_bytes(self) -> int:
        """Bytes of snapshots that are kept because somebody said so."""
        return self._retention.pinned_bytes

    @property
    def pins_refused(self) -> int:
        """Parts that were to be pinned beyond half of the limit, since the start."""
        return self._retention.pins_refused

    def keep(self, keys: Sequence[bytes], how: Keep) -> int:
        """Say how the chain `keys` is to be kept, now and when it comes back; how many of its chunks are there."""
        with self._lock:
            self._retention.keep(keys, how)
            there = 0
            for index, key in enumerate(keys, start=1):
                entry = self._entries.get(key)
                if entry is None:
                    break
                if self.layout.resumable or entry.states is not None:
                    there = index
            return there

    def expire(self) -> float | None:
        """Drop what nobody used for `ttl_s`; seconds until there may be more to drop, None when there is nothing."""
        now_s = self._clock.now_s()
        with self._lock:
            self._retention.end_orders(now_s)
            for part in self._retention.expired(now_s):
                entry = self._entries.get(part.key)
                if entry is not None and part in (entry.rows_part, entry.states_part) and not entry.pins:
                    self._drop(entry, part)
                    self._retention.evicted_by_age += 1
            return self._retention.next_expiry_s(now_s)

    def unpin(self, entries: Sequence[_Entry]) -> None:
        """Undo one `find`."""
        with self._lock:
            for entry in entries:
                entry.pins -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError when the account is wrong or beyond the limit."""
        with self._lock:
            total = sum(entry.nbytes for entry in self._entries.values()) + self._coming_bytes
            assert total == self._used_bytes, f"entries add up to {total} bytes, {self._used_bytes} are accounted"
            assert total <= self.limit_bytes, f"{total} bytes of snapshots, the limit is {self.limit_bytes}"
            parts = sum(1 + (entry.states is not None) for entry in self._entries.values())
            assert parts == len(self._retention), f"{parts} parts are kept, {len(self._retention)} are accounted"
            children: dict[bytes, int] = {}
            for entry in self._entries.values():
                if entry.parent is not None:
                    children[entry.parent] = children.get(entry.parent, 0) + 1
            assert children == self._children, "the account of chains is wrong"
            told = {key for key, entry in self._entries.items() if self.layout.resumable or entry.states is not None}
            assert told == set(self.ledger.snapshot()[1]), "what was announced is not what is there"

    def pinned(self) -> int:
        """Pins not yet released; 0 while idle."""
        with self._lock:
            return sum(entry.pins for entry in self._entries.values())

    def _is_checkpoint(self, chunk: int) -> bool:
        return not self.layout.resumable and self.layout.can_continue_at((chunk + 1) * self.layout.prefill_chunk_tokens)

    def _publish(
        self,
        entry: _Entry | None,
        keys: Sequence[bytes],
        chunk: int,
        rows: npt.NDArray[np.uint8] | None,
        states: npt.NDArray[np.uint8] | None,
    ) -> None:
        key = keys[chunk]
        cost = chunk_cost(self.layout.prefill_chunk_tokens, chunk)
        if entry is None:
            assert rows is not None
            entry = self._entries[key] = _Entry(key, keys[chunk - 1] if chunk else None, rows)
            if entry.parent is not None:
                self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
            entry.rows_part = self._retention.add(key, rows.nbytes, cost)
        if states is not None:
            entry.states = states
            entry.states_part = self._retention.add(key, states.nbytes, cost, is_states=True)
        if self.layout.resumable or states is not None:
            self.ledger.stored((key,))

    def _touch(self, chain: Sequence[bytes]) -> None:
        """The chain was used: its beginning most recently, and states only where it ends."""
        now_s = self._clock.now_s()
        for key in reversed(chain):
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.states_part is not None and key == chain[-1]:
                self._retention.touch(entry.states_part, now_s)
            if entry.rows_part is not None:
                self._retention.touch(entry.rows_part, now_s)

    def _make_room(self, nbytes: int, keep: frozenset[bytes]) -> bool:
        if nbytes > self.limit_bytes:
            return False
        if self._used_bytes + nbytes <= self.limit_bytes:
            return True
        may_go = sum(part.nbytes for part in self._retention.unpinned() if self._is_free(part, keep))
        if self._used_bytes + nbytes - may_go > self.limit_bytes:
            return False
        while self._used_bytes + nbytes > self.limit_bytes:
            part = self._retention.cheapest(lambda part: self._is_droppable(part, keep))
            if part is None:
                return False
            self._drop(self._entries[part.key], part)
            self._retention.evicted_for_room += 1
        return True

    def _is_free(self, part: Part, keep: frozenset[bytes]) -> bool:
        return part.key not in keep and not self._entries[part.key].pins

    def _is_droppable(self, part: Part, keep: frozenset[bytes]) -> bool:
        """States at any time; rows once nothing builds on them."""
        entry = self._entries[part.key]
        is_last = part is entry.states_part or (entry.states is None and part.key not in self._children)
        return is_last and self._is_free(part, keep)

    def _drop(self, entry: _Entry, part: Part) -> None:
        self._retention.remove(part)
        if part is entry.states_part:
            assert entry.states is not None
            self._used_bytes -= entry.states.nbytes
            entry.states = entry.states_part = None
            self.ledger.removed((entry.key,))
            return
        if entry.states_part is not None:
            self._drop(entry, entry.states_part)
        self._used_bytes -= entry.rows.nbytes
        del self._entries[entry.key]
        self.ledger.removed((entry.key,))
        if entry.parent is not None:
            self._children[entry.parent] -= 1
            if not self._children[entry.parent]:
                del self._children[entry.parent]


def row_spans(layout: KVLayout, chunk: int) -> list[Span]:
    """(tensor, start, end) of every growing tensor's rows in a whole prefill chunk."""
    step = layout.prefill_chunk_tokens
    return [(i, chunk * step, (chunk + 1) * step) for i, t in enumerate(layout.tensors) if t.kind.grows]


def state_spans(layout: KVLayout, tokens: int) -> list[Span]:
    """(tensor, start, end) of every window and state after `tokens` tokens."""
    return [(i, *layout.kept_span(i, tokens)) for i, t in enumerate(layout.tensors) if not t.kind.grows]


def _span_bytes(layout: KVLayout, span: Span) -> int:
    tensor, start, end = span
    return layout.tensors[tensor].rows(start, end) * layout.tensors[tensor].row_bytes


def _snapshot(read: ReadState, layout: KVLayout, spans: Sequence[Span]) -> npt.NDArray[np.uint8]:
    out = allocate_bytes(sum(_span_bytes(layout, span) for span in spans), dense=True)
    offset = 0
    for span in spans:
        view = read(*span)
        out[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
        offset += view.nbytes
    return out


def _write(place: memoryview, source: npt.NDArray[np.uint8], offset: int) -> int:
    end = offset + place.nbytes
    np.frombuffer(place, np.uint8)[:] = source[offset:end]
    return end
