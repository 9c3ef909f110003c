"""The receiving side of one transfer as a pure machine: `handle(event, now_s) -> effects`.

No I/O, no clock, no threads. Events may come in any order, twice, or late: what no longer matters yields no
effect. It ends exactly once; afterwards nothing is written any more (the driver fences).
"""

from __future__ import annotations

from farfill.core.cluster import FallbackReason
from farfill.core.errors import ProtocolError
from farfill.kv.manifest import Manifest
from farfill.transfer.events import (
    Accept,
    Ack,
    ChunkAborted,
    ChunkBegun,
    ChunkLanded,
    DropChunk,
    Ended,
    Failed,
    Heard,
    LinkDown,
    LinkUp,
    Nack,
    Opened,
    PeerFailed,
    ReceiverEffect,
    ReceiverEvent,
    Resumed,
    RevokeClaim,
    SendComplete,
    SendFail,
    Tick,
    TransferLimits,
    WriteChunk,
)
from farfill.transfer.grid import ChunkGrid
from farfill.wire.frames import MIN_CHUNK_BYTES

# A link may be so many times slower than it was before a chunk on its way counts as stuck.
TRICKLE_PATIENCE = 4.0


class ReceiverMachine:
    """Expected → opened → every chunk verified once → complete; or ended early with the usable prefix."""

    def __init__(
        self, manifest: Manifest, held: frozenset[int], limits: TransferLimits, chunk_limit_bytes: int, now_s: float
    ) -> None:
        self._manifest = manifest
        self._limits = limits
        self._chunk_limit_bytes = max(MIN_CHUNK_BYTES, chunk_limit_bytes)
        self._grid: ChunkGrid | None = None
        self._pieces: set[int] = set(held)
        self._chunks: set[int] = set()
        self._missing: dict[int, int] = {}
        self._claims: dict[int, int] = {}
        self._coming_since_s: dict[int, float] = {}  # the chunk that came first, first
        self._heard_s = now_s
        self._down_since_s: float | None = None
        self._silent = False
        self.ended: Ended | None = None

    @property
    def grid(self) -> ChunkGrid | None:
        """The cut in force; None before OPEN."""
        return self._grid

    @property
    def pieces(self) -> frozenset[int]:
        """Complete pieces, those held from the start included."""
        return frozenset(self._pieces)

    @property
    def prefix_tokens(self) -> int:
        """Tokens decode may use of what is held."""
        return self._manifest.complete_prefix_tokens(self._pieces)

    def begin(self) -> list[ReceiverEffect]:
        """A set that is held already needs no sender. Chunks may have come before this call."""
        return self._check_complete()

    def handle(self, event: ReceiverEvent, now_s: float) -> list[ReceiverEffect]:  # noqa: PLR0911, PLR0912 (a table)
        """Advance. After the end, chunks are dropped and nothing else happens."""
        if self.ended is not None:
            return [DropChunk("fenced")] if isinstance(event, ChunkBegun | ChunkLanded) else []
        match event:
            case ChunkBegun(chunk, claim):
                return self._begin_chunk(chunk, claim, now_s)
            case ChunkLanded(chunk, claim, problem):
                return self._land(chunk, claim, problem, now_s)
            case ChunkAborted(chunk, claim):
                if self._claims.get(chunk) == claim:
                    del self._claims[chunk]
                    self._coming_since_s.pop(chunk, None)
                return []
            case Heard():
                self._heard_s = now_s
                return []
            case Opened(chunk_bytes):
                return self._open(chunk_bytes, now_s)
            case Resumed():
                return self._resume(now_s)
            case LinkDown(silent=silent):
                if self._grid is not None and self._down_since_s is None:
                    self._down_since_s, self._silent = now_s, silent
                return []
            case LinkUp():
                self._down_since_s = None
                return []
            case Tick():
                return self._tick(now_s)
            case PeerFailed(reason, detail):
                return self._end(reason, detail, tell=False)
            case Failed(reason, detail):
                return self._end(reason, detail, tell=True)

    def _open(self, proposed: int, now_s: float) -> list[ReceiverEffect]:
        self._heard_s = now_s
        if self._grid is None:
            limit = self._chunk_limit_bytes // MIN_CHUNK_BYTES * MIN_CHUNK_BYTES
            try:
                self._grid = ChunkGrid(self._manifest, min(proposed, limit))
            except ProtocolError as error:
                return self._end(FallbackReason.PROTOCOL, str(error), tell=True)
            for piece in self._manifest.pieces:
                chunks = self._grid.of_piece(piece.index)
                if piece.index in self._pieces:
                    self._chunks.update(chunks)
                else:
                    self._missing[piece.index] = len(chunks)
        return [Accept(self._grid.chunk_bytes, frozenset(self._chunks))]

    def _resume(self, now_s: float) -> list[ReceiverEffect]:
        """The sender lost a connection: tell it what arrived, so that only the rest travels again."""
        self._heard_s = now_s
        return [] if self._grid is None else [Accept(self._grid.chunk_bytes, frozenset(self._chunks))]

    def _begin_chunk(self, chunk: int, claim: int, now_s: float) -> list[ReceiverEffect]:
        self._heard_s = now_s
        if self._grid is None:
            return [DropChunk("not_open")]
        if chunk in self._chunks:
            return [DropChunk("duplicate", acknowledge=True)]
        # A copy over another connection means that the sender gave the first one up.
        older = self._claims.get(chunk)
        self._claims[chunk] = claim
        self._coming_since_s.setdefault(chunk, now_s)
        return [WriteChunk()] if older is None else [RevokeClaim(older), WriteChunk()]

    def _land(self, chunk: int, claim: int, problem: str | None, now_s: float) -> list[ReceiverEffect]:
        if self._grid is None or self._claims.get(chunk) != claim:
            return [DropChunk("superseded")]
        del self._claims[chunk]
        self._coming_since_s.pop(chunk, None)
        self._heard_s = now_s
        if problem is not None:
            return [Nack(chunk, problem)]
        self._chunks.add(chunk)
        piece = self._grid.chunk(chunk).piece
        self._missing[piece] -= 1
        if self._missing[piece]:
            return [Ack(chunk)]
        self._pieces.add(piece)
        return [Ack(chunk), *self._check_complete()]

    def _check_complete(self) -> list[ReceiverEffect]:
        if self.ended is not None or len(self._pieces) < len(self._manifest.pieces):
            return []
        self.ended = Ended(FallbackReason.NONE, "")
        return [SendComplete(), self.ended]

    def _tick(self, now_s: float) -> list[ReceiverEffect]:
        down_s = 0.0 if self._down_since_s is None else now_s - self._down_since_s
        if now_s - self._heard_s < self._limits.timeout_s and down_s < self._limits.grace_s:
            return self._check_trickle(now_s)
        if self._down_since_s is not None:
            if self._silent:
                detail = f"nothing came over any connection of the sender; they were given up {down_s:.1f} s ago"
                return self._end(FallbackReason.TRANSFER_TIMEOUT, detail, tell=True)
            detail = f"every connection of the sender is gone for {down_s:.1f} s"
            return self._end(FallbackReason.LINK_LOST, detail, tell=True)
        what = "the sender never opened it" if self._grid is None else "no chunk and no sign of life"
        return self._end(FallbackReason.TRANSFER_TIMEOUT, f"{what} in {self._limits.timeout_s:g} s", tell=True)

    def _check_trickle(self, now_s: float) -> list[ReceiverEffect]:
        """Bytes and keepalives come, but a chunk takes far longer than its size and the rate seen before explain."""
        rate = self._limits.rate_bytes_per_s
        if rate is None or self._grid is None or not self._coming_since_s:
            return []
        chunk, since_s = next(iter(self._coming_since_s.items()))
        nbytes = self._grid.chunk(chunk).nbytes
        # All connections may share the line, each with a chunk of that size.
        limit_s = self._limits.timeout_s + TRICKLE_PATIENCE * self._limits.connections * nbytes / rate
        if now_s - since_s < limit_s:
            return []
        detail = f"{nbytes} bytes did not come whole in {limit_s:.1f} s, at {rate:.3g} bytes/s before"
        return self._end(FallbackReason.TRANSFER_TIMEOUT, detail, tell=True)

    def _end(self, reason: FallbackReason, detail: str, *, tell: bool) -> list[ReceiverEffect]:
        self.ended = Ended(reason, detail)
        self._claims.clear()
        self._coming_since_s.clear()
        return [SendFail(reason, detail), self.ended] if tell else [self.ended]
