"""What waits to leave for one peer, and what a connection that can take something is given.

Control frames first, then chunks, one transfer after the other in turn; when no chunk waits, one that is stuck on
another connection.
"""

from __future__ import annotations

from collections import deque
from threading import RLock

from farfill.clock import Clock
from farfill.core.errors import TicketError
from farfill.kv.codec import ChunkCodec
from farfill.transfer.allowance import Allowance
from farfill.transfer.events import Control, Pull
from farfill.transfer.outgoing import PushedTransfer
from farfill.transfer.peer_path import PeerPath
from farfill.transfer.turns import Turns
from farfill.transport.protocol import OutgoingFrame
from farfill.wire.frames import ReasonPayload


class Outbox:
    """Thread-safe. `lock` is the link's: it guards `path` and `allowance` too. Transfers are called without it."""

    def __init__(self, lock: RLock, path: PeerPath, allowance: Allowance, clock: Clock) -> None:
        self._lock = lock
        self._path = path
        self._allowance = allowance
        self._clock = clock
        self._transfers: dict[bytes, PushedTransfer] = {}
        self._turns: Turns[PushedTransfer] = Turns()
        self._control: deque[tuple[PushedTransfer, Control | ReasonPayload]] = deque()

    def add(self, transfer: PushedTransfer) -> None:
        """Raises TicketError (ticket_replayed) while a transfer with that ticket is under way."""
        with self._lock:
            if transfer.key in self._transfers:
                raise TicketError("a transfer with this ticket is under way", reason="ticket_replayed")
            self._transfers[transfer.key] = transfer

    def transfers(self) -> list[PushedTransfer]:
        """Those that have not ended."""
        with self._lock:
            return list(self._transfers.values())

    def transfer(self, key: bytes) -> PushedTransfer | None:
        """The live transfer with that key."""
        with self._lock:
            return self._transfers.get(key)

    @property
    def empty(self) -> bool:
        """Whether there is no transfer, and nothing to say either."""
        with self._lock:
            return not (self._transfers or self._control)

    @property
    def starved(self) -> bool:
        """Whether no chunk waits although prefill has more to come: then it is not the link that is slow."""
        transfers = self.transfers()
        return any(transfer.awaits_pieces for transfer in transfers) and not any(t.waiting_chunks for t in transfers)

    def queue_control(self, transfer: PushedTransfer, control: Control | ReasonPayload) -> None:
        """Say this before any chunk."""
        with self._lock:
            self._control.append((transfer, control))

    def ended(self, transfer: PushedTransfer, *, reachable: bool) -> None:
        """Of what it still had to say, only the FAIL matters, and only while the peer may be reached."""
        with self._lock:
            self._transfers.pop(transfer.key, None)
            self._turns.forget(transfer)
            self._control = deque(
                (owner, control)
                for owner, control in self._control
                if owner is not transfer or (isinstance(control, ReasonPayload) and reachable)
            )

    def forget_last_words(self) -> None:
        """Nobody is reached: what ended transfers still had to say is void."""
        with self._lock:
            self._control = deque(item for item in self._control if item[0].key in self._transfers)

    def next_control(self, connection: int) -> OutgoingFrame | None:
        """The next control frame of any transfer."""
        while True:
            with self._lock:
                if not self._control:
                    return None
                transfer, control = self._control.popleft()
            frame = transfer.control_frame(control, connection)
            if frame is not None:
                return frame

    def next_chunk(
        self, connection: int, codec: ChunkCodec, *, early: bool
    ) -> tuple[PushedTransfer, OutgoingFrame] | None:
        """The next chunk of the transfer whose turn it is; when none waits, one that is stuck on another connection.

        `early`: the connection may carry chunks before ACCEPT.
        """
        with self._lock:
            in_turn = self._turns.order(self._transfers.values())
            waiting = sum(transfer.waiting_chunks for transfer in in_turn)
            leaves = self._path.leaves_to_others(connection, waiting, self._clock.now_s())
        for transfer in in_turn if not leaves else ():
            if transfer.has_chunks(early=early):
                taken = self._pull(transfer, Pull(connection, self._patience_s(transfer), early), codec)
                if taken is not None or self._allowance.withheld:
                    return taken
        for transfer in in_turn:
            stuck, unseen = self._stuck(transfer.overdue_on(connection))
            if stuck or unseen:
                pull = Pull(connection, self._patience_s(transfer), early, stuck, unseen)
                taken = self._pull(transfer, pull, codec)
                if taken is not None:
                    return taken
        return None

    def _pull(
        self, transfer: PushedTransfer, pull: Pull, codec: ChunkCodec
    ) -> tuple[PushedTransfer, OutgoingFrame] | None:
        nbytes = transfer.chunk_bytes
        if not self._reserve(transfer, nbytes):
            return None
        frame: OutgoingFrame | None = None
        try:
            frame = transfer.pull(pull, codec)
        finally:
            with self._lock:
                self._allowance.encoded(nbytes)
                if frame is not None:
                    self._path.chunk_taken(self._clock.now_s())
                self._turns.charge(transfer, (frame.size if frame is not None else 0) - nbytes)
        return None if frame is None else (transfer, frame)

    def _reserve(self, transfer: PushedTransfer, nbytes: int) -> bool:
        """Whether the receiver's credit covers one more chunk; its bytes and its turn count from now on."""
        with self._lock:
            covered = self._allowance.reserve(nbytes)
            if covered:
                self._turns.charge(transfer, nbytes)
            return covered

    def _patience_s(self, transfer: PushedTransfer) -> float:
        """How long the acknowledgement of a chunk sent now may take, behind all that is on its way already."""
        with self._lock:
            return self._path.patience_s(self._allowance.ahead_bytes + transfer.chunk_bytes)

    def _stuck(self, connections: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Those of them that get nothing through to speak of, and those nothing is known of."""
        if not connections:
            return connections, connections
        with self._lock:
            return self._path.stuck(connections, self._clock.now_s())
