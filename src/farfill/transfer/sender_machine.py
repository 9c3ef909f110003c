"""The sending side of one transfer as a pure machine: `handle(event, now_s) -> effects`.

No I/O, no clock, no threads. Events may come in any order, twice, or late: what no longer matters yields no
effect. It ends exactly once. Every chunk is in one state: pending (to be sent), in flight on one connection,
doubtful (its connection broke, and the receiver was asked whether it arrived), or acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from farfill.core.cluster import FallbackReason
from farfill.core.errors import ProtocolError
from farfill.kv.manifest import Manifest
from farfill.transfer.events import (
    Accepted,
    Acked,
    ChunksReady,
    Confirmed,
    ConnectionLost,
    Control,
    ControlSent,
    Ended,
    Failed,
    Finished,
    Heard,
    LinkDown,
    LinkUp,
    Nacked,
    Offered,
    PeerCompleted,
    PeerFailed,
    Pull,
    Resent,
    SendChunk,
    SendControl,
    SenderEffect,
    SenderEvent,
    SendFail,
    Tick,
    TransferLimits,
)
from farfill.transfer.grid import ChunkGrid, unpack_bitmap


@dataclass(slots=True)
class _InFlight:
    connection: int
    sent_s: float


class SenderMachine:
    """OPEN → ACCEPT → chunks in offer order, each until acknowledged → FINISH → COMPLETE."""

    def __init__(self, manifest: Manifest, limits: TransferLimits, now_s: float) -> None:
        self._manifest = manifest
        self._limits = limits
        self._grid: ChunkGrid | None = None
        self._offered: set[int] = set()
        self._held_pieces: set[int] = set()
        self._pending: deque[int] = deque()
        self._inflight: dict[int, _InFlight] = {}  # the longest in flight first
        self._doubtful: dict[int, None] = {}
        self._asked = False
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, int] = {}
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
        """Whether a Pull would yield a chunk that waits."""
        return self.ended is None and bool(self._pending)

    def has_overdue(self, connection: int, overdue_s: float, now_s: float) -> bool:
        """Whether a Pull by `connection` would take over a chunk from one that is stuck."""
        return self.ended is None and not self._pending and self._overdue(connection, overdue_s, now_s) is not None

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
            case Pull(connection, overdue_s):
                return self._pull(connection, overdue_s, now_s)
            case Acked(chunk):
                return self._ack(chunk, now_s)
            case Nacked(chunk, attempt, reason):
                if chunk not in self._inflight or self._attempts[chunk] != attempt:
                    return []
                del self._inflight[chunk]
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
                return self._lose(connection, now_s)
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

    def _pull(self, connection: int, overdue_s: float, now_s: float) -> list[SenderEffect]:
        effects: list[SenderEffect] = []
        if self._pending:
            chunk = self._pending.popleft()
        else:
            overdue = self._overdue(connection, overdue_s, now_s)
            if overdue is None:
                return []
            chunk = overdue
            del self._inflight[chunk]
            self._attempts[chunk] += 1
            effects.append(Resent(chunk, "overdue"))
        self._inflight[chunk] = _InFlight(connection, now_s)
        self._sent_s = now_s
        return [*effects, SendChunk(chunk, self._attempts.setdefault(chunk, 0)), *self._check_finish(now_s)]

    def _overdue(self, connection: int, overdue_s: float, now_s: float) -> int | None:
        """The chunk longest in flight, if that is too long and elsewhere; each is taken over a few times only."""
        for chunk, flight in self._inflight.items():
            if now_s - flight.sent_s < overdue_s:
                return None
            if flight.connection != connection and self._attempts[chunk] <= self._limits.retry:
                return chunk
        return None

    def _ack(self, chunk: int, now_s: float) -> list[SenderEffect]:
        if self._grid is None or not 0 <= chunk < self._grid.num_chunks:
            return []
        self._acked.add(chunk)
        self._waiting_since_s = now_s
        if self._inflight.pop(chunk, None) is None:
            self._doubtful.pop(chunk, None)
            if chunk in self._pending:
                self._pending.remove(chunk)
        return self._check_finish(now_s)

    def _requeue(self, chunks: Iterable[int], reason: str, failure: FallbackReason) -> list[SenderEffect]:
        effects: list[SenderEffect] = []
        for chunk in chunks:
            failures = self._failures[chunk] = self._failures.get(chunk, 0) + 1
            if failures > self._limits.retry:
                detail = f"chunk {chunk} failed {failures} times, last: {reason}"
                return [*effects, *self._end(failure, detail, tell=True)]
            self._attempts[chunk] += 1
            self._pending.appendleft(chunk)
            effects.append(Resent(chunk, reason))
        return [*effects, ChunksReady()] if effects else []

    def _lose(self, connection: int, now_s: float) -> list[SenderEffect]:
        """What it carried is doubtful until the receiver has told what it holds."""
        for chunk in [c for c, flight in self._inflight.items() if flight.connection == connection]:
            del self._inflight[chunk]
            self._doubtful[chunk] = None
        effects: list[SenderEffect] = []
        for control in (Control.OPEN, Control.RESUME, Control.FINISH):
            unanswered = {Control.OPEN: self._grid is None, Control.RESUME: self._asked}.get(control, True)
            if unanswered and self._carried_by.get(control) == connection:
                del self._carried_by[control]
                effects.append(SendControl(control))
        if self._doubtful and not self._asked:
            self._asked = True
            self._carried_by.pop(Control.RESUME, None)
            self._waiting_since_s = now_s
            effects.append(SendControl(Control.RESUME))
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
            return self._reconcile(self._grid, held, now_s)
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

    def _reconcile(self, grid: ChunkGrid, held: bytes, now_s: float) -> list[SenderEffect]:
        """The receiver told what it holds: of the doubtful chunks, only the others travel again."""
        try:
            arrived = unpack_bitmap(held, grid.num_chunks)
        except ProtocolError as error:
            return self._end(FallbackReason.PROTOCOL, str(error), tell=True)
        self._asked = False
        known = [chunk for chunk in self._doubtful if chunk in arrived]
        missing = sorted(chunk for chunk in self._doubtful if chunk not in arrived)
        self._doubtful.clear()
        self._acked.update(known)
        effects: list[SenderEffect] = [Confirmed(chunk) for chunk in known]
        effects += self._requeue(reversed(missing), "connection_lost", FallbackReason.LINK_LOST)
        return effects if self.ended is not None else [*effects, *self._check_finish(now_s)]

    def _check_finish(self, now_s: float) -> list[SenderEffect]:
        """FINISH once everything was offered and has left."""
        if not self._finished or self._grid is None or self._finish_requested:
            return []
        missing = len(self._manifest.pieces) - len(self._offered | self._held_pieces)
        if missing:
            return self._end(FallbackReason.PROTOCOL, f"prefill ended with {missing} pieces missing", tell=True)
        if self._pending or self._doubtful:
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
        limits = self._limits
        grace_s = limits.open_grace_s if self._grid is None else limits.grace_s
        waiting = self._grid is None or (self._finish_requested and not self._pending and not self._inflight)
        late = (waiting or self._asked) and now_s - self._waiting_since_s >= limits.timeout_s
        if self._down_since_s is not None and (late or now_s - self._down_since_s >= grace_s):
            return self._end(FallbackReason.LINK_LOST, self._down_detail or "no connection is left", tell=True)
        if late:
            what = "not accepted" if self._grid is None else "not confirmed"
            return self._end(FallbackReason.TRANSFER_TIMEOUT, f"{what} in {limits.timeout_s:g} s", tell=True)
        # Chunks that wait for the link are no silence of ours.
        return self._keepalive(now_s) if self._pending or self._inflight or self._doubtful else []

    def _end(self, reason: FallbackReason, detail: str, *, tell: bool) -> list[SenderEffect]:
        self.ended = Ended(reason, detail)
        self._pending.clear()
        self._inflight.clear()
        self._doubtful.clear()
        return [SendFail(reason, detail), self.ended] if tell else [self.ended]
