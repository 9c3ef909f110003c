"""KV memory of a future sequence while it is filled from outside."""

from __future__ import annotations

import threading

from farfill.engine.executor import SequenceKV
from farfill.engine.memory import Hold, KVMemory, Owner
from farfill.engine.prefix import PrefixHit
from farfill.kv.manifest import Manifest


class Slot:
    """A `KVSlot`: owns its memory until `take` hands it to a generation or `release` gives it back."""

    def __init__(self, manifest: Manifest, capacity_tokens: int) -> None:
        self.manifest = manifest
        self.capacity_tokens = capacity_tokens
        self.kv: SequenceKV | None = None
        self.held: frozenset[int] = frozenset()
        self.hit: PrefixHit | None = None
        self._hold: Hold | None = None
        self._lock = threading.Lock()
        self.live = True

    def fill(self, memory: KVMemory, nbytes: int) -> None:
        """Take `nbytes` for the sequence and its further choices, or raise CapacityError."""
        self._hold = memory.hold(self, nbytes)

    def offer_hit(self, hit: PrefixHit | None) -> None:
        """Declare what a local prefix hit supplies; a hit that cannot be used as it is goes back."""
        if hit is None:
            return
        chunks = hit.tokens // self.manifest.layout.prefill_chunk_tokens
        if not self.manifest.layout.resumable and hit.tokens != self.manifest.num_tokens:
            hit.release()
            return
        self.hit = hit
        self.held = frozenset(p.index for group in self.manifest.by_prefill_chunk[:chunks] for p in group)

    def buffer(self, piece: int) -> memoryview:
        """The writable place of piece `piece`."""
        kv = self.kv
        assert kv is not None, "the slot was released or handed over"
        wanted = self.manifest.pieces[piece]
        return kv.place(wanted.tensor, wanted.start_token, wanted.end_token)

    def take(self, owner: Owner | None) -> tuple[SequenceKV, Hold, PrefixHit | None] | None:
        """Hand everything over to `owner`, once; None when it was released or taken before."""
        with self._lock:
            if self.kv is None or self._hold is None:
                return None
            self._hold.owner = owner or self
            self.live = False
            taken = self.kv, self._hold, self.hit
            self.kv = self._hold = self.hit = None
            return taken

    def release(self) -> None:
        """Give everything back. Idempotent; does nothing once a generation owns it."""
        taken = self.take(None)
        if taken is not None:
            _, hold, hit = taken
            hold.release()
            if hit is not None:
                hit.release()
