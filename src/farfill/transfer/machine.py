"""The two sides of one transfer as pure machines: `handle(event, now_s) -> effects`.

No I/O, no clock, no threads. Events may come in any order, twice, or late: what no longer matters yields no
effect. Each machine ends exactly once; afterwards the receiver writes nothing any more (drivers fence).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from farfill.core.cluster import FallbackReason
from farfill.core.errors import ProtocolError
from farfill.kv.manifest import Manifest
from farfill.transfer.events import (
    Accept,
    Accepted,
    Ack,
    Acked,
    ChunkAborted,
    ChunkBegun,
    ChunkLanded,
    ChunksReady,
    ConnectionLost,
    Control,
    ControlSent,
    DropChunk,
    Ended,
    Failed,
    Finished,
    Heard,
    LinkDown,
    LinkUp,
    Nack,
    Nacked,
    Offered,
    Opened,
    PeerCompleted,
    PeerFailed,
    Pull,
    ReceiverEffect,
    ReceiverEvent,
    Resent,
    RevokeClaim,
    SendChunk,
    SendComplete,
    SendControl,
    SenderEffect,
    SenderEvent,
    SendFail,
    Tick,
    TransferLimits,
    WriteChunk,
)
from farfill.transfer.grid import ChunkGrid, unpack_bitmap
from farfill.wire.frames import MIN_CHUNK_BYTES


class SenderMachine:
    """OPEN → ACCEPT → chunks in offer order, each until acknowledged → FINISH → COMPLETE."""

    def __init__(self, manifest: Manifest, limits: TransferLimits, now_s: float) -> None:
        self._manifest = manifest
        self._limits = limits
        self._grid: ChunkGrid | None = None
        self._offered: set[int] = set()
        self._held_pieces: set[int] = set()
        self._pending: deque[int] = deque()
        self._inflight: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._acked: set[int] = set()
        self._carried_by: dict[Control, int] = {}
        self._finished = False
        self._finish_requested = False
        self._waiting_since_s = now_s
        self._down_since_s: float | None = None
        self._down_detail = ""
        self._sent_s = now_s
        self.ended: Ended | None = None

    @property
    def grid(self) -> ChunkGrid | None:
        """The cut the receiver chose; None before ACCEPT."""
        return self._grid

    @property
    def has_chunks(self) -> bool:
        """Whether a Pull would yield a chunk."""
        return self.ended is None and bool(self._pending)

    @property
    def inflight(self) -> int:
        """Chunks sent and not yet acknowledged."""
        return len(self._inflight)

    def begin(self) -> list[SenderEffect]:
        """The first effects."""
        return [SendControl(Control.OPEN)]

    def handle(self, event: SenderEvent, now_s: float) -> list[SenderEffect]:  # noqa: PLR0911, PLR0912 (a table)
        """Advance. Nothing happens after the end."""
        if self.ended is not None:
            return []
        match event:
            case Pull(connection):
                return self._pull(connection, now_s)
            case Acked(chunk):
                return self._ack(chunk, now_s)
            case Nacked(chunk, attempt, reason):
                if self._inflight.get(chunk) is None or self._attempts[chunk] != attempt:
                    return []
                return self._requeue([chunk], reason, FallbackReason.CHECKSUM)
            case Offered(pieces):
                return self._offer(pieces)
            case Accepted(chunk_bytes, held):
                return self._accept(chunk_bytes, held, now_s)
            case Finished():
                self._finished = True
                return self._check_finish(now_s)
            case ControlSent(control, connection):
                self._carried_by[control] = connection
                self._sent_s = now_s
                return []
            case ConnectionLost(connection):
                return self._lose(connection)
            case Heard():
                return self._keepalive(now_s)
            case LinkDown(detail):
                if self._down_since_s is None:
                    self._down_since_s, self._down_detail = now_s, detail
                return []
            case LinkUp():
                self._down_since_s = None
                return []
            case Tick():
                return self._tick(now_s)
            case PeerCompleted():
                return self._end(FallbackReason.NONE, "", tell=False)
            case PeerFailed(reason, detail):
                return self._end(reason, detail, tell=False)
            case Failed(reason, detail):
                return self._end(reason, detail, tell=True)

    def _pull(self, connection: int, now_s: float) -> list[SenderEffect]:
        if not self._pending:
            return []
        chunk = self._pending.popleft()
        self._inflight[chunk] = connection
        self._sent_s = now_s
        attempt = self._attempts.setdefault(chunk, 0)
        return [SendChunk(chunk, attempt), *self._check_finish(now_s)]

    def _ack(self, chunk: int, now_s: float) -> list[SenderEffect]:
        if self._grid is None or not 0 <= chunk < self._grid.num_chunks:
            return []
        self._acked.add(chunk)
        if self._inflight.pop(chunk, None) is None and chunk in self._pending:
            self._pending.remove(chunk)
        self._waiting_since_s = now_s
        return []

    def _requeue(self, chunks: Iterable[int], reason: str, failure: FallbackReason) -> list[SenderEffect]:
        effects: list[SenderEffect] = []
        for chunk in chunks:
            del self._inflight[chunk]
            if self._attempts[chunk] >= self._limits.retry:
                detail = f"chunk {chunk} failed {self._attempts[chunk] + 1} times, last: {reason}"
                return [*effects, *self._end(failure, detail, tell=True)]
            self._attempts[chunk] += 1
            self._pending.appendleft(chunk)
            effects.append(Resent(chunk, reason))
        return [*effects, ChunksReady()] if effects else []

    def _lose(self, connection: int) -> list[SenderEffect]:
        lost = sorted(chunk for chunk, carrier in self._inflight.items() if carrier == connection)
        effects = self._requeue(reversed(lost), "connection_lost", FallbackReason.LINK_LOST)
        if self.ended is not None:
            return effects
        for control in (Control.OPEN, Control.FINISH):
            unanswered = control is Control.FINISH or self._grid is None
            if unanswered and self._carried_by.get(control) == connection:
                del self._carried_by[control]
                effects.append(SendControl(control))
        return effects

    def _offer(self, pieces: Iterable[int]) -> list[SenderEffect]:
        ready = False
        for piece in pieces:
            if not 0 <= piece < len(self._manifest.pieces):
                return self._end(FallbackReason.PROTOCOL, f"piece {piece} is not in the manifest", tell=True)
            if piece in self._offered:
                continue
            self._offered.add(piece)
            ready = self._queue(piece) or ready
        return [ChunksReady()] if ready else []

    def _queue(self, piece: int) -> bool:
        if self._grid is None:
            return False
        chunks = [chunk for chunk in self._grid.of_piece(piece) if chunk not in self._acked]
        self._pending.extend(chunks)
        return bool(chunks)

    def _accept(self, chunk_bytes: int, held: bytes, now_s: float) -> list[SenderEffect]:
        self._waiting_since_s = now_s
        if self._grid is not None:
            return []
        try:
            grid = ChunkGrid(self._manifest, chunk_bytes)
            self._acked = unpack_bitmap(held, grid.num_chunks)
        except ProtocolError as error:
            return self._end(FallbackReason.PROTOCOL, str(error), tell=True)
        self._grid = grid
        for piece in self._manifest.pieces:
            if all(chunk in self._acked for chunk in grid.of_piece(piece.index)):
                self._held_pieces.add(piece.index)
        for piece in sorted(self._offered):
            self._queue(piece)
        return [ChunksReady(), *self._check_finish(now_s)]

    def _check_finish(self, now_s: float) -> list[SenderEffect]:
        """FINISH once everything was offered and has left."""
        if not self._finished or self._grid is None or self._finish_requested:
            return []
        missing = len(self._manifest.pieces) - len(self._offered | self._held_pieces)
        if missing:
            return self._end(FallbackReason.PROTOCOL, f"prefill ended with {missing} pieces missing", tell=True)
        if self._pending:
            return []
        self._finish_requested = True
        self._waiting_since_s = now_s
        return [SendControl(Control.FINISH)]

    def _keepalive(self, now_s: float) -> list[SenderEffect]:
        if self._grid is None or now_s - self._sent_s < self._limits.keepalive_s:
            return []
        self._sent_s = now_s
        return [SendControl(Control.KEEPALIVE)]

    def _tick(self, now_s: float) -> list[SenderEffect]:
        if self._down_since_s is not None and now_s - self._down_since_s >= self._limits.grace_s:
            return self._end(FallbackReason.LINK_LOST, self._down_detail or "no connection is left", tell=True)
        waiting = self._grid is None or (self._finish_requested and not self._pending and not self._inflight)
        if waiting and now_s - self._waiting_since_s >= self._limits.timeout_s:
            what = "not accepted" if self._grid is None else "not confirmed"
            return self._end(FallbackReason.TRANSFER_TIMEOUT, f"{what} in {self._limits.timeout_s:g} s", tell=True)
        # Chunks that wait for the link are no silence of ours.
        return self._keepalive(now_s) if self._pending or self._inflight else []

    def _end(self, reason: FallbackReason, detail: str, *, tell: bool) -> list[SenderEffect]:
        self.ended = Ended(reason, detail)
        self._pending.clear()
        self._inflight.clear()
        return [SendFail(reason, detail), self.ended] if tell else [self.ended]


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
        self._heard_s = now_s
        self._down_since_s: float | None = None
        self.ended: Ended | None = None

    @property
    def grid(self) -> ChunkGrid | None:
        """The cut in force; None before OPEN."""
        return self._grid

    @property
    def prefix_tokens(self) -> int:
        """Tokens decode may use of what is held."""
        return self._manifest.complete_prefix_tokens(self._pieces)

    def begin(self) -> list[ReceiverEffect]:
        """A set that is held already needs no sender."""
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
                return []
            case Heard():
                self._heard_s = now_s
                return []
            case Opened(chunk_bytes):
                return self._open(chunk_bytes, now_s)
            case LinkDown():
                if self._grid is not None and self._down_since_s is None:
                    self._down_since_s = now_s
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

    def _begin_chunk(self, chunk: int, claim: int, now_s: float) -> list[ReceiverEffect]:
        self._heard_s = now_s
        if self._grid is None:
            return [DropChunk("not_open")]
        if chunk in self._chunks:
            return [DropChunk("duplicate", acknowledge=True)]
        # A copy over another connection means that the sender gave the first one up.
        older = self._claims.get(chunk)
        self._claims[chunk] = claim
        return [WriteChunk()] if older is None else [RevokeClaim(older), WriteChunk()]

    def _land(self, chunk: int, claim: int, problem: str | None, now_s: float) -> list[ReceiverEffect]:
        if self._grid is None or self._claims.get(chunk) != claim:
            return [DropChunk("superseded")]
        del self._claims[chunk]
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
        if len(self._pieces) < len(self._manifest.pieces):
            return []
        self.ended = Ended(FallbackReason.NONE, "")
        return [SendComplete(), self.ended]

    def _tick(self, now_s: float) -> list[ReceiverEffect]:
        if self._down_since_s is not None and now_s - self._down_since_s >= self._limits.grace_s:
            detail = f"every connection of the sender is gone for {self._limits.grace_s:g} s"
            return self._end(FallbackReason.LINK_LOST, detail, tell=True)
        if now_s - self._heard_s >= self._limits.timeout_s:
            what = "the sender never opened it" if self._grid is None else "no chunk and no sign of life"
            detail = f"{what} in {self._limits.timeout_s:g} s"
            return self._end(FallbackReason.TRANSFER_TIMEOUT, detail, tell=True)
        return []

    def _end(self, reason: FallbackReason, detail: str, *, tell: bool) -> list[ReceiverEffect]:
        self.ended = Ended(reason, detail)
        self._claims.clear()
        return [SendFail(reason, detail), self.ended] if tell else [self.ended]
