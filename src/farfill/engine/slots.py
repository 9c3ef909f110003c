"""KV memory of a future sequence while it is filled from outside."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

from farfill.engine.checkpoints import Checkpoints
from farfill.engine.executor import SequenceKV
from farfill.engine.memory import Hold, KVMemory, Owner
from farfill.engine.prefix import PrefixHit
from farfill.kv.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Taken:
    """All that a slot owned."""

    kv: SequenceKV
    hold: Hold
    hit: PrefixHit | None
    checkpoints: Checkpoints | None


class Slot:
    """A `KVSlot`: owns its memory until `take` hands it to a generation or `release` gives it back."""

    def __init__(self, manifest: Manifest, capacity_tokens: int) -> None:
        self.manifest = manifest
        self.capacity_tokens = capacity_tokens
        self.held: frozenset[int] = frozenset()
        self._kv: SequenceKV | None = None
        self._hit: PrefixHit | None = None
        self._hold: Hold | None = None
        self._checkpoints: Checkpoints | None = None
        self._lock = threading.Lock()
        self.live = True

    @property
    def filled_bytes(self) -> int:
        """Nothing counts before all of it is there."""
        return 0

    def fill(self, memory: KVMemory, nbytes: int) -> None:
        """Take `nbytes` for the sequence, its further choices and its checkpoints, or raise CapacityError."""
        self._hold = memory.hold(self, nbytes)

    def open(self, kv: SequenceKV, hit: PrefixHit | None) -> None:
        """Let pieces come into `kv`. What a local prefix hit supplies need not come.

        Rows of the hit are copied only when a generation takes the slot. Checkpoints before the hit's end count as
        held although nobody has them: a generation starts at the hit's end or behind it.
        """
        self._kv, self._hit = kv, hit
        if self.manifest.checkpoint_pieces:
            self._checkpoints = Checkpoints(self.manifest)
        if hit is None:
            return
        self.held = frozenset(piece.index for piece in self.manifest.pieces if piece.end_token <= hit.tokens)

    def buffer(self, piece: int) -> memoryview:
        """The writable place of piece `piece`."""
        kv = self._kv
        assert kv is not None, "the slot was released or handed over"
        kept = self._checkpoints.buffer(piece) if self._checkpoints is not None else None
        if kept is not None:
            return kept
        wanted = self.manifest.pieces[piece]
        return kv.place(wanted.tensor, wanted.start_token, wanted.end_token)

    def received(self, pieces: Collection[int]) -> None:
        """See `protocol.KeepsCheckpoints`."""
        if self._checkpoints is not None:
            self._checkpoints.arrived([piece for piece in pieces if piece not in self.held])

    def take(self, owner: Owner | None) -> Taken | None:
        """Hand everything over to `owner`, once; None when it was released or taken before."""
        with self._lock:
            if self._kv is None or self._hold is None:
                return None
            self._hold.owner = owner or self
            self.live = False
            taken = Taken(self._kv, self._hold, self._hit, self._checkpoints)
            self._kv = self._hold = self._hit = self._checkpoints = None
            return taken

    def release(self) -> None:
        """Give everything back. Idempotent; does nothing once a generation owns it."""
        taken = self.take(None)
        if taken is not None:
            taken.hold.release()
            if taken.hit is not None:
                taken.hit.release()
            return
        # Without KV (its allocation failed) there may still be a hold.
        with self._lock:
            hold, self._hold = self._hold, None
            self.live = False
        if hold is not None:
            hold.release()
