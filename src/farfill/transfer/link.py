"""The pooled connections from this worker to one decode worker, and the transfers that share them.

Each connection has a thread that dials, serves and redials with backoff and jitter. Connections take work from
one place: control frames first, then chunks, one transfer after the other in turn. So a slow or dead
connection holds back only what it carries, and a small transfer never waits behind a large one.
"""

from __future__ import annotations

import math
import os
from collections import deque
from threading import RLock

import structlog

from farfill.clock import Clock
from farfill.config.model import KVTransferConfig
from farfill.core.cluster import FallbackReason
from farfill.core.errors import TicketError
from farfill.core.layout import TensorLayout
from farfill.kv.codec import ChunkCodec
from farfill.topology.connections import ConnectionTuner
from farfill.topology.estimate import LinkEstimate
from farfill.transfer.encoder import ChunkEncoder, EncodedChunk
from farfill.transfer.events import Control, LinkUp, Pull, Tick
from farfill.transfer.last_chunks import LastChunks
from farfill.transfer.limits import known_reason, liveness_of
from farfill.transfer.observer import TransferObserver
from farfill.transfer.outgoing import PushedTransfer
from farfill.transfer.path_watch import PathWatch
from farfill.transfer.sender_session import SenderSession
from farfill.transfer.slot import Slot
from farfill.transfer.turns import Turns
from farfill.transport.protocol import OutgoingFrame, PathSample, Transport
from farfill.transport.reactor import Reactor
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import EarlyGrant, HelloPayload, ReasonPayload

# An acknowledgement that takes this many times what link and queue explain is overdue.
OVERDUE_FACTOR = 4.0
OVERDUE_UNKNOWN_S = 2.0
SLOW_ACCEPT_ROUND_TRIPS = 3.0
# No more leaves before ACCEPT than fills the line until it can come: it may say that much of it is held there already.
EARLY_ROUND_TRIPS = 2.0
EARLY_MIN_CHUNKS = 4
EARLY_UNKNOWN_BYTES = 4 * 1024 * 1024
# Unsent bytes of all connections together: so much of the link's rate, so that threads need not wake for every packet,
# and no more than a part of what waits, so that all connections end at about the same time.
UNSENT_S = 0.05
UNSENT_PART = 4
UNSENT_RENEWED_S = 0.005
UNSENT_UNKNOWN_BYTES = 2 * 1024 * 1024
UNSENT_MIN_BYTES = 16 * 1024
UNSENT_MAX_BYTES = 512 * 1024

_log = structlog.get_logger(__name__)


class AdoptedSlot:
    """A connection the other end dialled. Its thread belongs to the door it came through."""

    alive = False

    def __init__(self, link: PeerLink, number: int, waker: Waker) -> None:
        self.waker = waker
        self.number = number
        self.failed = False
        self.standing = False
        self.session: SenderSession | None = None
        self._link = link

    def retry_now(self) -> None:
        """Only the other end can."""

    def stop(self) -> None:
        """End after what is queued."""
        if self.session is not None:
            self.session.finish()

    def abort(self) -> None:
        """End at once."""
        self.waker.stop()

    def over(self) -> None:
        """It ended, and nothing follows."""
        self._link.abandon(self)


class PeerLink:
    """One peer. `address` empty: the peer dials.

    Locks nest nowhere: transfers are called without holding the link's.
    """

    def __init__(
        self,
        address: str,
        peer_name: str,
        me: HelloPayload,
        transport: Transport,
        reactor: Reactor,
        *,
        config: KVTransferConfig,
        clock: Clock,
        observer: TransferObserver,
    ) -> None:
        self.address = address
        self.peer_name = peer_name
        self.me = me
        self.transport = transport
        self.reactor = reactor
        self.clock = clock
        self.observer = observer
        self.config = config
        self.liveness = liveness_of(config)
        self.estimate = LinkEstimate()
        self._lock = RLock()
        self._transfers: dict[bytes, PushedTransfer] = {}
        self._turns: Turns[PushedTransfer] = Turns()
        self._control: deque[tuple[PushedTransfer, Control | ReasonPayload]] = deque()
        self._unsettled_bytes = 0
        self._reserved_bytes = 0
        self._credit_bytes = math.inf
        self._grant = EarlyGrant()
        self._early_bytes = 0
        self._unsent = float("-inf"), UNSENT_MAX_BYTES
        self._withheld = False
        self._used_s = clock.now_s()
        self._tuner = ConnectionTuner(None if config.connections == "auto" else config.connections)
        self._watch = PathWatch()
        self._last = LastChunks()
        self._encoder = ChunkEncoder(config, min(self._tuner.wanted, os.cpu_count() or 1), clock)
        self._numbers = 0
        self._slots: list[Slot | AdoptedSlot] = []
        self._retired: list[Slot | AdoptedSlot] = []
        self._started = False

    # For the sender

    def start(self) -> None:
        """Start dialling, unless the peer does."""
        self._started = bool(self.address)
        self._resize()

    def add(self, transfer: PushedTransfer) -> None:
        """Serve a new transfer; connections that wait for their next attempt try at once.

        Raises TicketError (ticket_replayed) while a transfer with that ticket is under way.
        """
        with self._lock:
            if transfer.key in self._transfers:
                raise TicketError("a transfer with this ticket is under way", reason="ticket_replayed")
            self._transfers[transfer.key] = transfer
        for slot in self._slots:
            slot.retry_now()
        transfer.begin()

    def fail_all(self, reason: FallbackReason, detail: str) -> None:
        """End every transfer from this side."""
        for transfer in self._snapshot():
            transfer.fail(reason, detail)

    def tick(self) -> None:
        """Let time pass for every transfer. Raises nothing."""
        for transfer in self._snapshot():
            transfer.handle(Tick())
        self._tune()

    def unused_s(self) -> float:
        """How long nothing was asked of it and no connection stood; 0 while it is of use."""
        if self.wanted or any(slot.standing for slot in self._slots):
            self._used_s = self.clock.now_s()
        return self.clock.now_s() - self._used_s

    @property
    def active(self) -> int:
        """Transfers not ended."""
        with self._lock:
            return len(self._transfers)

    def stop(self) -> None:
        """Let connections say what they still have to say, then end."""
        self._started = False
        for slot in self._slots:
            slot.stop()

    def abort(self) -> None:
        """End connections at once."""
        self._started = False
        for slot in [*self._slots, *self._retired]:
            slot.abort()

    @property
    def alive(self) -> bool:
        """Whether a thread still runs."""
        return any(slot.alive for slot in [*self._slots, *self._retired])

    @property
    def busy(self) -> bool:
        """Whether chunks are on their way."""
        return self._unsettled_bytes > 0

    @property
    def unsent_bytes(self) -> int:
        """How much a connection may hold that has not left: what is committed to a slow one cannot go elsewhere."""
        now_s = self.clock.now_s()
        until_s, nbytes = self._unsent
        if now_s >= until_s:
            nbytes = self._measure_unsent()
            self._unsent = now_s + UNSENT_RENEWED_S, nbytes
        return nbytes

    def _measure_unsent(self) -> int:
        transfers = self._snapshot()
        with self._lock:
            rate = self.estimate.rate_bytes_per_s
        lanes = max(1, len(self._slots))
        waiting = sum(transfer.waiting_bytes for transfer in transfers)
        flowing = UNSENT_UNKNOWN_BYTES if rate is None else rate * UNSENT_S
        return int(min(UNSENT_MAX_BYTES, max(UNSENT_MIN_BYTES, min(flowing, waiting / UNSENT_PART) / lanes)))

    @property
    def chunk_limit_bytes(self) -> float:
        """The largest chunk the receiver takes, once it has told."""
        with self._lock:
            return self._grant.chunk_bytes or math.inf

    @property
    def connections(self) -> int:
        """How many are kept, standing or not."""
        return self._tuner.wanted if self.address else max(1, len(self._slots))

    # For transfers (see `outgoing.Link`)

    def queue_control(self, transfer: PushedTransfer, control: Control | ReasonPayload) -> None:
        with self._lock:
            self._control.append((transfer, control))
        self._wake()

    def chunks_ready(self) -> None:
        self._wake()

    def reserve_early(self, chunk_bytes: int, total_bytes: int) -> int:
        with self._lock:
            grant = self._grant
            if not any(slot.standing for slot in self._slots) or chunk_bytes > grant.chunk_bytes:
                return 0
            rate, rtt_s = self.estimate.rate_bytes_per_s, self.estimate.rtt_s
            useful = EARLY_UNKNOWN_BYTES if rate is None or rtt_s is None else EARLY_ROUND_TRIPS * rate * rtt_s
            useful = max(EARLY_MIN_CHUNKS * chunk_bytes, int(useful))
            nbytes = max(0, min(total_bytes, useful, grant.early_bytes - self._early_bytes))
            self._early_bytes += nbytes
            return nbytes

    def release_early(self, nbytes: int, waited_s: float) -> None:
        with self._lock:
            self._early_bytes -= nbytes
            if waited_s > SLOW_ACCEPT_ROUND_TRIPS * (self.estimate.rtt_s or 0.0):
                self.estimate.interrupted()  # what waited there for its transfer tells nothing about the link
                self._encoder.interrupted()

    def sent(self, wire_bytes: int) -> None:
        self._encoder.sent(wire_bytes)
        with self._lock:
            self._unsettled_bytes += wire_bytes
            self.estimate.busy(self.clock.now_s(), at_full_rate=self._encoder.link_bound)

    def settled(self, wire_bytes: int, raw_bytes: int) -> None:
        if not wire_bytes:
            return
        self._encoder.settled(wire_bytes, raw_bytes)
        with self._lock:
            now_s = self.clock.now_s()
            self._watch.acked(wire_bytes)
            withheld, self._withheld = self._withheld, False
            self._unsettled_bytes -= wire_bytes
            still_busy = self._unsettled_bytes > 0
            before = self.estimate.rate_bytes_per_s
            self.estimate.acknowledged(wire_bytes if raw_bytes else 0, now_s, still_busy=still_busy)
            rate, rtt_s = self.estimate.rate_bytes_per_s, self.estimate.rtt_s
        if withheld:
            self._wake()
        if rate != before:
            self.observer.link(self.peer_name, rate, rtt_s)

    def encode(self, raw: memoryview, tensor: TensorLayout, offset: int, codec: ChunkCodec) -> EncodedChunk:
        return self._encoder.encode(raw, tensor, offset, codec)

    def ended(self, transfer: PushedTransfer) -> None:
        with self._lock:
            self._transfers.pop(transfer.key, None)
            self._turns.forget(transfer)
            # Of what it still had to say, only the FAIL matters, and only while the peer may be reached.
            self._control = deque(
                (owner, control)
                for owner, control in self._control
                if owner is not transfer or (isinstance(control, ReasonPayload) and not self._down)
            )

    # For connections

    def session(self, slot: Slot, peer: PeerIdentity) -> SenderSession:
        """What is said on a connection this end dialled."""
        return SenderSession(self, slot, peer)

    def adopt(self, peer: PeerIdentity, waker: Waker) -> SenderSession:
        """What is said on a connection the peer dialled."""
        with self._lock:
            slot = AdoptedSlot(self, self._numbers, waker)
            self._numbers += 1
            slot.session = SenderSession(self, slot, peer)
            self._slots = [*self._slots, slot]
        return slot.session

    def abandon(self, slot: AdoptedSlot) -> None:
        """It is closed."""
        with self._lock:
            self._slots = [other for other in self._slots if other is not slot]

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a connection."""
        with self._lock:
            return bool(self._transfers or self._control)

    def transfer(self, key: bytes) -> PushedTransfer | None:
        """The live transfer with that key."""
        with self._lock:
            return self._transfers.get(key)

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
            leaves = self._last.leaves(connection, waiting, self.estimate.rtt_s or 0.0, self.clock.now_s())
        for transfer in in_turn if not leaves else ():
            if transfer.has_chunks(early=early):
                taken = self._pull(transfer, Pull(connection, self._patience_s(transfer), early), codec)
                if taken is not None or self._withheld:
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
                self._reserved_bytes -= nbytes
                if frame is not None:
                    self._last.taken(self.clock.now_s())
                self._turns.charge(transfer, (frame.size if frame is not None else 0) - nbytes)
        return None if frame is None else (transfer, frame)

    def _reserve(self, transfer: PushedTransfer, nbytes: int) -> bool:
        """Whether the receiver's credit covers one more chunk; its bytes count from now on."""
        with self._lock:
            before = self._unsettled_bytes + self._reserved_bytes
            self._withheld = before > 0 and before + nbytes > self._credit_bytes
            if not self._withheld:
                self._reserved_bytes += nbytes
                self._turns.charge(transfer, nbytes)
            return not self._withheld

    def credit(self, nbytes: int, grant: EarlyGrant) -> None:
        """The receiver allows so many unacknowledged bytes, and so much before ACCEPT. One chunk may always travel."""
        with self._lock:
            self._credit_bytes = nbytes
            self._grant = grant
        self._wake()

    def connected(self, generation: str) -> None:
        """A connection was welcomed by that run of the peer."""
        self._report_connections()
        for transfer in self._snapshot():
            transfer.peer_is(generation)
            transfer.handle(LinkUp())

    def disconnected(self, connection: int, error: Exception | None) -> None:
        """A connection that was welcomed is over."""
        self._encoder.interrupted()
        with self._lock:
            self._watch.gone(connection)
            self._last.gone(connection)
            self.estimate.interrupted()
        self._report_connections()
        if error is not None:
            _log.info("transfer_connection_lost", peer=self.peer_name, address=self.address, detail=str(error))
        for transfer in self._snapshot():
            transfer.connection_lost(connection)

    def attempt_failed(self, error: Exception) -> None:
        """A connection could not be had, or is gone."""
        if not self._down:
            return
        with self._lock:
            self._control = deque(item for item in self._control if item[0].key in self._transfers)
        for transfer in self._snapshot():
            transfer.link_down(f"{self.address}: {error}")

    def refused(self, reason: str, detail: str) -> None:
        """The peer will never serve this side as it is: what waits is over."""
        self.observer.refused(known_reason(reason))
        _log.warning(
            "transfer_connection_refused", peer=self.peer_name, address=self.address, reason=reason, detail=detail
        )
        for transfer in self._snapshot():
            transfer.peer_failed(ReasonPayload(reason, detail))

    def round_trip(self, seconds: float) -> None:
        """A PING was answered."""
        with self._lock:
            self.estimate.round_trip(seconds)
            rate, rtt_s = self.estimate.rate_bytes_per_s, self.estimate.rtt_s
        self.observer.link(self.peer_name, rate, rtt_s)

    def sampled(self, connection: int, path: PathSample) -> None:
        """The kernel told about one connection."""
        with self._lock:
            self._watch.sampled(connection, path, self.clock.now_s())
            self._last.sampled(connection, path.window_bytes_per_s)

    @property
    def rtt_s(self) -> float | None:
        """The round trip, once known."""
        with self._lock:
            return self.estimate.rtt_s

    def measured(self) -> tuple[float | None, float | None]:
        """(bytes/s, round trip in s), as far as known."""
        with self._lock:
            return self.estimate.rate_bytes_per_s, self.estimate.rtt_s

    def _patience_s(self, transfer: PushedTransfer) -> float:
        """How long the acknowledgement of a chunk sent now may take, behind all that is on its way already."""
        with self._lock:
            rate = self.estimate.rate_bytes_per_s
            if rate is None:
                return OVERDUE_UNKNOWN_S
            ahead_bytes = self._unsettled_bytes + self._reserved_bytes + transfer.chunk_bytes
            return OVERDUE_FACTOR * (ahead_bytes / rate + (self.estimate.rtt_s or 0.0))

    def _stuck(self, connections: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Those of them that get nothing through to speak of, and those nothing is known of."""
        if not connections:
            return connections, connections
        now_s = self.clock.now_s()
        with self._lock:
            rate = self.estimate.rate_bytes_per_s or 0.0
            moves = {number: self._watch.moves(number, rate, now_s) for number in connections}
        return (
            frozenset(number for number, moving in moves.items() if moving is False),
            frozenset(number for number, moving in moves.items() if moving is None),
        )

    def _tune(self) -> None:
        """Let the number of connections follow what the path showed."""
        now_s = self.clock.now_s()
        busy = any(transfer.has_chunks() for transfer in self._snapshot())
        with self._lock:
            path = self._watch.take(now_s)
            if path is None:
                return
            self._tuner.observe(
                now_s,
                congestion=path.congestion,
                rtt_s=path.rtt_s,
                acked_bytes=path.acked_bytes,
                segments_sent=path.segments_sent,
                segments_resent=path.segments_resent,
                busy=busy,
            )
        self.observer.path(self.peer_name, path.rtt_s, path.segments_resent, path.delivery_bytes_per_s)
        self._resize()

    def _resize(self) -> None:
        self._retired = [slot for slot in self._retired if slot.alive]
        while self._started and len(self._slots) < self._tuner.wanted:
            slot = Slot(self, self._numbers)
            self._numbers += 1
            # A new list each time: other threads walk the old one meanwhile.
            self._slots = [*self._slots, slot]
            slot.thread.start()
        while self._started and len(self._slots) > self._tuner.wanted:
            *self._slots, slot = self._slots
            self._retired = [*self._retired, slot]
            slot.stop()

    @property
    def _down(self) -> bool:
        """Whether no connection stands and each was tried in vain."""
        return all(slot.failed and not slot.standing for slot in self._slots)

    def _snapshot(self) -> list[PushedTransfer]:
        with self._lock:
            return list(self._transfers.values())

    def _report_connections(self) -> None:
        self.observer.connections(self.peer_name, sum(slot.standing for slot in self._slots))

    def _wake(self) -> None:
        for slot in self._slots:
            slot.waker.wake()
