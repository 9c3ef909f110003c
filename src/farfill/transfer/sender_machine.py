"""The sending side of one transfer as a pure machine: `handle(event, now_s) -> effects`.

No I/O, no clock, no threads. Events may come in any order, twice, or late: what no longer matters yields no
effect. It ends exactly once. Every chunk is in one state: pending (to be sent), in flight on one connection,
doubtful (its connection broke, and the receiver is asked whether it arrived), or acknowledged.

With a grant of the receiver, chunks leave before ACCEPT (early), cut as proposed. The receiver answers each of them:
ACK, or NACK `early_refused`, and then it waits for ACCEPT. Should ACCEPT name another cut, everything starts afresh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
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

EARLY_REFUSED = "early_refused"
# No chunk is overdue sooner.
OVERDUE_MIN_S = 1.0


@dataclass(slots=True)
class _InFlight:
    connection: int
    sent_s: float
    patience_s: float
    early: bool


class SenderMachine:
    """OPEN → ACCEPT → chunks in offer order, each until acknowledged → FINISH → COMPLETE."""

    def __init__(self, manifest: Manifest, limits: TransferLimits, now_s: float) -> None:
        self._manifest = manifest
        self._limits = limits
        self._grid: ChunkGrid | None = None
        self._accepted = False
        self._completed = False
        self._early_bytes = 0
        self._offered: set[int] = set()
        self._held_pieces: set[int] = set()
        self._pending: deque[int] = deque()
        self._inflight: dict[int, _InFlight] = {}  # the longest in flight first
        self._doubtful: dict[int, None] = {}
        self._asked = False
        self._attempts: dict[int, int] = {}
        self._first_attempt = 0
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
        """The cut in force: the one proposed while chunks leave early, then the receiver's; None before either."""
        return self._grid

    @property
    def accepted(self) -> bool:
        """Whether the receiver has accepted."""
        return self._accepted

    def has_chunks(self, *, early: bool) -> bool:
        """Whether a Pull would most likely yield a chunk that waits. May be asked while another thread advances."""
        if self.ended is not None or not self._pending:
            return False
        return self._accepted or (early and self._grid is not None and self._early_bytes >= self._next_bytes)

    def overdue_on(self, connection: int, now_s: float) -> frozenset[int]:
        """The other connections that have had a chunk for long, should one of them be stuck."""
        if self.ended is not None or self._pending:
            return frozenset()
        return frozenset(flight.connection for _, flight in self._long_in_flight(connection, now_s))

    @property
    def waiting(self) -> int:
        """Chunks to be sent."""
        return len(self._pending)

    @property
    def awaits_pieces(self) -> bool:
        """Whether more is to be offered."""
        return not self._finished and self.ended is None

    @property
    def inflight(self) -> int:
        """Chunks sent and not yet acknowledged."""
        return len(self._inflight)

    def begin(self, proposed_bytes: int = 0, early_bytes: int = 0) -> list[SenderEffect]:
        """The first effects. `early_bytes` may leave before ACCEPT, in the cut that OPEN proposes."""
        if early_bytes and self.ended is None:
            self._grid = ChunkGrid(self._manifest, proposed_bytes)
            self._early_bytes = early_bytes
        return [SendControl(Control.OPEN)]

    def handle(self, event: SenderEvent, now_s: float) -> list[SenderEffect]:  # noqa: PLR0911, PLR0912 (a table)
        """Advance. Nothing happens after the end."""
        if self.ended is not None:
            return []
        match event:
            case Pull():
                return self._pull(event, now_s)
            case Acked(chunk):
                return self._ack(chunk, now_s)
            case Nacked(chunk, attempt, reason):
                if chunk not in self._inflight or self._attempts[chunk] != attempt:
                    return []
                flight = self._inflight.pop(chunk)
                if reason == EARLY_REFUSED and flight.early:
                    return self._take_back(chunk)
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
            case PeerCompleted(answers_open):
                # Copies travel on several connections. One that comes before ACCEPT has overtaken it, or is of an
                # earlier use of the ticket, which the receiver refuses.
                self._completed = True
                return self._end(FallbackReason.NONE, "", tell=False) if self._accepted or answers_open else []
            case PeerFailed(reason, detail):
                return self._end(reason, detail, tell=False)
            case Failed(reason, detail):
                return self._end(reason, detail, tell=True)

    def _pull(self, pull: Pull, now_s: float) -> list[SenderEffect]:
        effects: list[SenderEffect] = []
        if self.has_chunks(early=pull.early):
            chunk = self._pending.popleft()
        else:
            stuck = None if self._pending else self._take_over(pull, now_s)
            if stuck is None:
                return []
            chunk = stuck
            del self._inflight[chunk]
            self._attempts[chunk] += 1
            effects.append(Resent(chunk, "overdue"))
        early = not self._accepted
        if early:
            self._early_bytes -= self._nbytes(chunk)
        self._inflight[chunk] = _InFlight(pull.connection, now_s, pull.patience_s, early)
        self._sent_s = now_s
        attempt = self._attempts.setdefault(chunk, self._first_attempt)
        return [*effects, SendChunk(chunk, attempt, early), *self._check_finish(now_s)]

    @property
    def _next_bytes(self) -> int:
        try:
            return self._nbytes(self._pending[0])
        except IndexError:
            return 0

    def _nbytes(self, chunk: int) -> int:
        assert self._grid is not None
        return self._grid.chunk(chunk).nbytes

    def _take_back(self, chunk: int) -> list[SenderEffect]:
        """The receiver had no use for it yet: no failure of the link, and no more of them before ACCEPT."""
        self._early_bytes = 0
        self._attempts[chunk] += 1
        self._pending.appendleft(chunk)
        return [Resent(chunk, EARLY_REFUSED), *([ChunksReady()] if self._accepted else [])]

    def _take_over(self, pull: Pull, now_s: float) -> int | None:
        for chunk, flight in self._long_in_flight(pull.connection, now_s):
            late = flight.connection in pull.unseen and now_s - flight.sent_s >= flight.patience_s
            if late or flight.connection in pull.stuck:
                return chunk
        return None

    def _long_in_flight(self, connection: int, now_s: float) -> Iterator[tuple[int, _InFlight]]:
        """On other connections than this one, the longest first; each chunk is taken over a few times only."""
        if not self._accepted:
            return
        for chunk, flight in self._inflight.items():
            if now_s - flight.sent_s < OVERDUE_MIN_S:
                return
            if flight.connection != connection and self._attempts[chunk] <= self._limits.retry:
                yield chunk, flight

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
            unanswered = {Control.OPEN: not self._accepted, Control.RESUME: self._asked}.get(control, True)
            if unanswered and self._carried_by.get(control) == connection:
                del self._carried_by[control]
                effects.append(SendControl(control))
        return [*effects, *self._ask(now_s)]

    def _ask(self, now_s: float) -> list[SenderEffect]:
        """What does the receiver hold of the doubtful chunks? It can tell once it has accepted."""
        if not self._doubtful or self._asked or not self._accepted:
            return []
        self._asked = True
        self._carried_by.pop(Control.RESUME, None)
        self._waiting_since_s = now_s
        return [SendControl(Control.RESUME)]

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
        if self._accepted and self._grid is not None:
            return self._reconcile(self._grid, held, now_s)
        effects: list[SenderEffect] = []
        try:
            if self._grid is None or self._grid.chunk_bytes != chunk_bytes:
                effects += self._recut(chunk_bytes)
            assert self._grid is not None
            held_chunks = unpack_bitmap(held, self._grid.num_chunks)
        except ProtocolError as error:
            return self._end(FallbackReason.PROTOCOL, str(error), tell=True)
        grid, self._accepted = self._grid, True
        if self._completed:
            return [*effects, *self._end(FallbackReason.NONE, "", tell=False)]
        self._acked |= held_chunks
        for piece in self._manifest.pieces:
            if all(chunk in held_chunks for chunk in grid.of_piece(piece.index)):
                self._held_pieces.add(piece.index)
        self._pending = deque(chunk for chunk in self._pending if chunk not in held_chunks)
        for flight in self._inflight.values():
            flight.sent_s = now_s  # how long the receiver took to accept says nothing about the link
        return [*effects, ChunksReady(), *self._ask(now_s), *self._check_finish(now_s)]

    def _recut(self, chunk_bytes: int) -> list[SenderEffect]:
        """Another cut than the one in which chunks left early, if any did: they count as never sent.

        What is still answered of them does no harm: an ACK means that these bytes are in place in the receiver's cut
        too, and a NACK names an attempt of before.
        """
        self._grid = ChunkGrid(self._manifest, chunk_bytes)
        void = [*self._inflight, *self._doubtful]
        if self._attempts:
            self._first_attempt = 1 + max(self._attempts.values())
        for state in (self._inflight, self._doubtful, self._attempts, self._failures, self._acked, self._pending):
            state.clear()
        for piece in sorted(self._offered):
            self._queue(piece)
        return [Resent(chunk, "recut") for chunk in void]

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
        if not self._finished or not self._accepted or self._finish_requested:
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
        if not self._accepted or now_s - self._sent_s < self._limits.keepalive_s:
            return []
        self._sent_s = now_s
        return [SendControl(Control.KEEPALIVE)]

    def _tick(self, now_s: float) -> list[SenderEffect]:
        limits = self._limits
        grace_s = limits.grace_s if self._accepted else limits.open_grace_s
        waiting = not self._accepted or (self._finish_requested and not self._pending and not self._inflight)
        late = (waiting or self._asked) and now_s - self._waiting_since_s >= limits.timeout_s
        if self._down_since_s is not None and (late or now_s - self._down_since_s >= grace_s):
            return self._end(FallbackReason.LINK_LOST, self._down_detail or "no connection is left", tell=True)
        if late:
            what = "not confirmed" if self._accepted else "not accepted"
            return self._end(FallbackReason.TRANSFER_TIMEOUT, f"{what} in {limits.timeout_s:g} s", tell=True)
        # Chunks that wait for the link are no silence of ours.
        return self._keepalive(now_s) if self._pending or self._inflight or self._doubtful else []

    def _end(self, reason: FallbackReason, detail: str, *, tell: bool) -> list[SenderEffect]:
        self.ended = Ended(reason, detail)
        self._pending.clear()
        self._inflight.clear()
        self._doubtful.clear()
        return [SendFail(reason, detail), self.ended] if tell else [self.ended]
