"""The pooled connections from this worker to one decode worker, and the transfers that share them.

Connections take work from one place: control frames first, then chunks, one transfer after the other in turn. So a
slow or dead connection holds back only what it carries, and a small transfer never waits behind a large one.
"""

from __future__ import annotations

import os
from threading import RLock

import structlog

from farfill.clock import Clock
from farfill.config.model import KVTransferConfig
from farfill.core.cluster import FallbackReason
from farfill.core.layout import TensorLayout
from farfill.kv.codec import ChunkCodec
from farfill.transfer.allowance import Allowance
from farfill.transfer.encoder import ChunkEncoder, EncodedChunk
from farfill.transfer.events import Control, LinkUp, Tick
from farfill.transfer.lanes import Lanes
from farfill.transfer.limits import known_reason, liveness_of
from farfill.transfer.observer import TransferObserver
from farfill.transfer.outbox import Outbox
from farfill.transfer.outgoing import PushedTransfer
from farfill.transfer.peer_path import PeerPath
from farfill.transfer.sender_session import SenderSession
from farfill.transfer.slot import Slot
from farfill.transport.protocol import OutgoingFrame, PathSample, Transport
from farfill.transport.reactor import Reactor
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import EarlyGrant, HelloPayload, ReasonPayload

UNSENT_RENEWED_S = 0.005

_log = structlog.get_logger(__name__)


class PeerLink:
    """One peer. `address` empty: the peer dials.

    One lock guards what waits (`Outbox`), what is known of the path, and what may be on its way. Locks nest nowhere:
    transfers are called without holding it.
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
        self._lock = RLock()
        self._allowance = Allowance()
        self._path = PeerPath(None if config.connections == "auto" else config.connections)
        self._outbox = Outbox(self._lock, self._path, self._allowance, clock)
        self._unsent = float("-inf"), 0
        self._used_s = clock.now_s()
        self._encoder = ChunkEncoder(config, min(self._path.connections, os.cpu_count() or 1), clock)
        self._lanes = Lanes(lambda number: Slot(self, number))

    # For the sender

    def start(self) -> None:
        """Start dialling, unless the peer does."""
        if self.address:
            self._lanes.start(self._path.connections)

    def add(self, transfer: PushedTransfer) -> None:
        """Serve a new transfer; connections that wait for their next attempt try at once.

        Raises TicketError (ticket_replayed) while a transfer with that ticket is under way.
        """
        self._outbox.add(transfer)
        self._lanes.retry_now()
        transfer.begin()

    def fail_all(self, reason: FallbackReason, detail: str) -> None:
        """End every transfer from this side."""
        for transfer in self._outbox.transfers():
            transfer.fail(reason, detail)

    def tick(self) -> None:
        """Let time pass for every transfer. Raises nothing."""
        for transfer in self._outbox.transfers():
            transfer.handle(Tick())
        self._tune()

    def unused_s(self) -> float:
        """How long nothing was asked of it and no connection stood; 0 while it is of use."""
        if self.wanted or self._lanes.standing:
            self._used_s = self.clock.now_s()
        return self.clock.now_s() - self._used_s

    @property
    def active(self) -> int:
        """Transfers not ended."""
        return len(self._outbox.transfers())

    def stop(self) -> None:
        """Let connections say what they still have to say, then end."""
        self._lanes.stop()

    def abort(self) -> None:
        """End connections at once."""
        self._lanes.abort()

    @property
    def alive(self) -> bool:
        """Whether a thread still runs."""
        return self._lanes.alive

    @property
    def busy(self) -> bool:
        """Whether chunks are on their way."""
        return self._allowance.unsettled_bytes > 0

    @property
    def unsent_bytes(self) -> int:
        """How much a connection may hold that has not left: what is committed to a slow one cannot go elsewhere."""
        now_s = self.clock.now_s()
        until_s, nbytes = self._unsent
        if now_s >= until_s:
            waiting = sum(transfer.waiting_bytes for transfer in self._outbox.transfers())
            with self._lock:
                nbytes = self._path.unsent_bytes(waiting, max(1, self._lanes.count))
            self._unsent = now_s + UNSENT_RENEWED_S, nbytes
        return nbytes

    @property
    def chunk_limit_bytes(self) -> float:
        """The largest chunk the receiver takes, once it has told."""
        with self._lock:
            return self._allowance.chunk_limit_bytes

    @property
    def connections(self) -> int:
        """How many are kept, standing or not."""
        return self._path.connections if self.address else max(1, self._lanes.count)

    # For transfers (see `outgoing.Link`)

    def queue_control(self, transfer: PushedTransfer, control: Control | ReasonPayload) -> None:
        self._outbox.queue_control(transfer, control)
        self._lanes.wake()

    def chunks_ready(self) -> None:
        self._lanes.wake()

    def reserve_early(self, chunk_bytes: int, total_bytes: int) -> int:
        if not self._lanes.standing:
            return 0
        with self._lock:
            return self._allowance.reserve_early(chunk_bytes, total_bytes, self._path.early_bytes(chunk_bytes))

    def release_early(self, nbytes: int, waited_s: float) -> None:
        with self._lock:
            self._allowance.release_early(nbytes)
            if self._path.is_slow_accept(waited_s):
                self._path.disturbed()  # what waited there for its transfer tells nothing about the link
                self._encoder.interrupted()

    def sent(self, wire_bytes: int) -> None:
        self._encoder.sent(wire_bytes)
        with self._lock:
            self._allowance.sent(wire_bytes)
            self._path.sent(self.clock.now_s(), at_full_rate=self._encoder.link_bound)

    def settled(self, wire_bytes: int, raw_bytes: int) -> None:
        if not wire_bytes:
            return
        self._encoder.settled(wire_bytes, raw_bytes)
        starved = self._outbox.starved
        with self._lock:
            withheld = self._allowance.settled(wire_bytes)
            changed = self._path.settled(
                wire_bytes,
                self.clock.now_s(),
                arrived=raw_bytes > 0,
                still_busy=self._allowance.unsettled_bytes > 0,
                starved=starved,
            )
        if withheld:
            self._lanes.wake()
        if changed:
            self.observer.link(self.peer_name, *self.measured())

    def encode(self, raw: memoryview, tensor: TensorLayout, offset: int, codec: ChunkCodec) -> EncodedChunk:
        return self._encoder.encode(raw, tensor, offset, codec)

    def ended(self, transfer: PushedTransfer) -> None:
        self._outbox.ended(transfer, reachable=not self._lanes.down)

    # For connections

    def session(self, slot: Slot, peer: PeerIdentity) -> SenderSession:
        """What is said on a connection this end dialled."""
        return SenderSession(self, slot, peer)

    def adopt(self, peer: PeerIdentity, waker: Waker) -> SenderSession:
        """What is said on a connection the peer dialled."""
        return self._lanes.adopt(waker, lambda slot: SenderSession(self, slot, peer))

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a connection."""
        return not self._outbox.empty

    def transfer(self, key: bytes) -> PushedTransfer | None:
        """The live transfer with that key."""
        return self._outbox.transfer(key)

    def next_control(self, connection: int) -> OutgoingFrame | None:
        """The next control frame of any transfer."""
        return self._outbox.next_control(connection)

    def next_chunk(
        self, connection: int, codec: ChunkCodec, *, early: bool
    ) -> tuple[PushedTransfer, OutgoingFrame] | None:
        """See `Outbox.next_chunk`."""
        return self._outbox.next_chunk(connection, codec, early=early)

    def credit(self, nbytes: int, grant: EarlyGrant) -> None:
        """The receiver allows so many unacknowledged bytes, and so much before ACCEPT. One chunk may always travel."""
        with self._lock:
            self._allowance.granted(nbytes, grant)
        self._lanes.wake()

    def connected(self, generation: str) -> None:
        """A connection was welcomed by that run of the peer."""
        self._report_connections()
        for transfer in self._outbox.transfers():
            transfer.peer_is(generation)
            transfer.handle(LinkUp())

    def disconnected(self, connection: int, error: Exception | None) -> None:
        """A connection that was welcomed is over."""
        self._encoder.interrupted()
        with self._lock:
            self._path.gone(connection)
        self._report_connections()
        if error is not None:
            _log.info("transfer_connection_lost", peer=self.peer_name, address=self.address, detail=str(error))
        for transfer in self._outbox.transfers():
            transfer.connection_lost(connection)

    def attempt_failed(self, error: Exception) -> None:
        """A connection could not be had, or is gone."""
        if not self._lanes.down:
            return
        self._outbox.forget_last_words()
        for transfer in self._outbox.transfers():
            transfer.link_down(f"{self.address}: {error}")

    def refused(self, reason: str, detail: str) -> None:
        """The peer will never serve this side as it is: what waits is over."""
        self.observer.refused(known_reason(reason))
        _log.warning(
            "transfer_connection_refused", peer=self.peer_name, address=self.address, reason=reason, detail=detail
        )
        for transfer in self._outbox.transfers():
            transfer.peer_failed(ReasonPayload(reason, detail))

    def round_trip(self, seconds: float) -> None:
        """A PING was answered."""
        with self._lock:
            self._path.round_trip(seconds)
        self.observer.link(self.peer_name, *self.measured())

    def sampled(self, connection: int, path: PathSample) -> None:
        """The kernel told about one connection."""
        with self._lock:
            self._path.sampled(connection, path, self.clock.now_s())

    @property
    def rtt_s(self) -> float | None:
        """The round trip, once known."""
        with self._lock:
            return self._path.rtt_s

    def measured(self) -> tuple[float | None, float | None]:
        """(bytes/s, round trip in s), as far as known."""
        with self._lock:
            return self._path.rate_bytes_per_s, self._path.rtt_s

    def _tune(self) -> None:
        """Let the number of connections follow what the path showed."""
        busy = any(transfer.has_chunks() for transfer in self._outbox.transfers())
        with self._lock:
            path = self._path.tune(self.clock.now_s(), busy=busy)
        if path is not None:
            self.observer.path(
                self.peer_name, path.rtt_s, path.segments_sent, path.segments_resent, path.delivery_bytes_per_s
            )
            self._lanes.resize(self._path.connections)

    def _report_connections(self) -> None:
        self.observer.connections(self.peer_name, self._lanes.standing)
