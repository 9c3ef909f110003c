"""The pooled connections from this worker to one decode worker, and the transfers that share them.

Each connection has a thread that dials, serves and redials with backoff and jitter. Connections take work from
one place: control frames first, then chunks, one transfer after the other in turn. So a slow or dead
connection holds back only what it carries, and a small transfer never waits behind a large one.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from threading import RLock, Thread

import structlog

from farfill.clock import Clock
from farfill.config.model import KVTransferConfig
from farfill.core.cluster import FallbackReason
from farfill.core.errors import FarfillError, IncompatiblePeerError, ProtocolError, TicketError
from farfill.kv.codec import ChunkCodec, Codec
from farfill.topology.estimate import LinkEstimate
from farfill.transfer.adapt import CodecChooser, measure_codecs
from farfill.transfer.events import Control, LinkUp, PeerCompleted, Tick
from farfill.transfer.limits import known_reason, liveness_of
from farfill.transfer.observer import TransferObserver
from farfill.transfer.outgoing import PushedTransfer
from farfill.transfer.session import PeerSession
from farfill.transport.connection import Connection
from farfill.transport.errors import IdentityError, TransportError, TransportInterruptedError
from farfill.transport.protocol import ChunkSink, OutgoingFrame, Transport
from farfill.transport.waker import Waker
from farfill.wire.frames import (
    AcceptPayload,
    FrameHeader,
    FrameType,
    HelloPayload,
    ReasonPayload,
    decode_payload,
)

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
# Without a transfer to serve, an unreachable peer is left alone after so many attempts per connection.
IDLE_DIALS = 3

_log = structlog.get_logger(__name__)


class PeerLink:
    """One peer address. Locks nest nowhere: transfers are called without holding the link's lock."""

    def __init__(
        self,
        address: str,
        peer_name: str,
        me: HelloPayload,
        transport: Transport,
        *,
        config: KVTransferConfig,
        clock: Clock,
        observer: TransferObserver,
    ) -> None:
        self.address = address
        self.peer_name = peer_name
        self.me = me
        self.transport = transport
        self.clock = clock
        self.observer = observer
        self.config = config
        self.liveness = liveness_of(config)
        self.estimate = LinkEstimate()
        self._lock = RLock()
        self._transfers: dict[bytes, PushedTransfer] = {}
        self._turn: deque[PushedTransfer] = deque()
        self._control: deque[tuple[PushedTransfer, Control | ReasonPayload]] = deque()
        self._unsettled_bytes = 0
        self._used_s = clock.now_s()
        self._chooser = CodecChooser(min(config.connections, os.cpu_count() or 1))
        self._slots = [_Slot(self, number) for number in range(config.connections)]

    # For the sender

    def start(self) -> None:
        """Start dialling."""
        for slot in self._slots:
            slot.thread.start()

    def add(self, transfer: PushedTransfer) -> None:
        """Serve a new transfer; connections that wait for their next attempt try at once.

        Raises TicketError (ticket_replayed) while a transfer with that ticket is under way.
        """
        with self._lock:
            if transfer.key in self._transfers:
                raise TicketError("a transfer with this ticket is under way", reason="ticket_replayed")
            self._transfers[transfer.key] = transfer
            self._turn.append(transfer)
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
        for slot in self._slots:
            slot.stop()

    def abort(self) -> None:
        """End connections at once."""
        for slot in self._slots:
            slot.waker.stop()

    @property
    def alive(self) -> bool:
        """Whether a thread still runs."""
        return any(slot.thread.is_alive() for slot in self._slots)

    # For transfers (see `outgoing.Link`)

    def queue_control(self, transfer: PushedTransfer, control: Control | ReasonPayload) -> None:
        with self._lock:
            self._control.append((transfer, control))
        self._wake()

    def chunks_ready(self) -> None:
        self._wake()

    def sent(self, wire_bytes: int, codec: Codec) -> None:
        with self._lock:
            now_s = self.clock.now_s()
            self._unsettled_bytes += wire_bytes
            self.estimate.busy(now_s, at_full_rate=codec is Codec.NONE)
            self._chooser.sent(codec, now_s)

    def settled(self, wire_bytes: int, raw_bytes: int) -> None:
        if not wire_bytes:
            return
        with self._lock:
            now_s = self.clock.now_s()
            self._unsettled_bytes -= wire_bytes
            still_busy = self._unsettled_bytes > 0
            before = self.estimate.rate_bytes_per_s
            self.estimate.acknowledged(wire_bytes if raw_bytes else 0, now_s, still_busy=still_busy)
            self._chooser.confirmed(raw_bytes, now_s, still_busy=still_busy)
            rate, rtt_s = self.estimate.rate_bytes_per_s, self.estimate.rtt_s
        if rate != before:
            self.observer.link(self.peer_name, rate, rtt_s)

    def codec_for(self, sample: memoryview, item_bytes: int, codec: ChunkCodec) -> Codec:
        if self.config.compression != "auto":
            return Codec[self.config.compression.upper()]
        with self._lock:
            wants_sample = self._chooser.wants_sample(self.clock.now_s())
        if wants_sample:
            samples = measure_codecs(codec, sample, item_bytes)
            with self._lock:
                self._chooser.sampled(samples)
        with self._lock:
            return self._chooser.choose(self.estimate.rate_bytes_per_s)

    def ended(self, transfer: PushedTransfer) -> None:
        with self._lock:
            self._transfers.pop(transfer.key, None)
            if transfer in self._turn:
                self._turn.remove(transfer)
            # Of what it still had to say, only the FAIL matters, and only while the peer may be reached.
            self._control = deque(
                (owner, control)
                for owner, control in self._control
                if owner is not transfer or (isinstance(control, ReasonPayload) and not self._down)
            )

    # For connections

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

    def next_chunk(self, connection: int, codec: ChunkCodec) -> tuple[PushedTransfer, OutgoingFrame] | None:
        """The next chunk of the transfer whose turn it is."""
        for _ in range(len(self._turn)):
            with self._lock:
                if not self._turn:
                    return None
                transfer = self._turn[0]
                self._turn.rotate(-1)
            if transfer.has_chunks and (frame := transfer.pull(connection, codec)) is not None:
                return transfer, frame
        return None

    def connected(self, generation: str) -> None:
        """A connection was welcomed by that run of the peer."""
        self._report_connections()
        for transfer in self._snapshot():
            transfer.peer_is(generation)
            transfer.handle(LinkUp())

    def disconnected(self, connection: int, error: Exception | None) -> None:
        """A connection that was welcomed is over."""
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


class _Slot:
    """One connection of the pool over its whole life, on its own thread."""

    def __init__(self, link: PeerLink, number: int) -> None:
        self.waker = Waker()
        self.failed = False
        self.standing = False
        self._link = link
        self._number = number
        self._retry_now = False
        self._stopping = False
        self._session: _DiallerSession | None = None
        self.thread = Thread(target=self._run, name=f"farfill-kv-send-{link.peer_name}-{number}", daemon=True)

    def retry_now(self) -> None:
        """Forget past failures."""
        if not self.standing:
            self.failed = False
        self._retry_now = True
        self.waker.wake()

    def stop(self) -> None:
        """End after what is queued."""
        self._stopping = True
        session = self._session
        if session is None:
            self.waker.stop()
        else:
            session.finish()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping and not self.waker.stopped:
                if self._retry_now:
                    self._retry_now = False
                    failures = 0
                if failures >= IDLE_DIALS and not self._link.wanted:
                    self.waker.sleep(BACKOFF_MAX_S)
                    continue
                if self._serve():
                    failures = 0
                failures += 1
                self._back_off(failures)
        finally:
            self.waker.close()

    def _serve(self) -> bool:
        """One connection from dialling to its end; whether it was welcomed."""
        link = self._link
        try:
            channel = link.transport.dial(link.address, timeout_s=link.liveness.handshake_s, interrupt=self.waker)
            if channel.peer.name != link.peer_name:
                channel.close()
                raise IdentityError(f"{link.address} is {channel.peer.name!r}, not {link.peer_name!r}")
        except TransportInterruptedError:
            return False
        except TransportError as error:
            self.failed = True
            if isinstance(error, IdentityError):
                link.refused(error.reason, str(error))
            link.attempt_failed(error)
            return False
        session = _DiallerSession(link, self, self._number)
        self._session = session
        if self._stopping:
            session.finish()
        Connection(channel, session, self.waker, link.clock).run()
        self._session = None
        return session.welcomed

    def _back_off(self, failures: int) -> None:
        """Wait longer each time, by chance a little more or less; a new transfer cuts it short."""
        wait_s = min(BACKOFF_FIRST_S * 2 ** (failures - 1), BACKOFF_MAX_S) * random.uniform(0.5, 1.5)  # noqa: S311
        until_s = time.monotonic() + wait_s
        while not (self._retry_now or self._stopping or self.waker.stopped):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self.waker.sleep(left_s)


class _DiallerSession(PeerSession):
    """The sender's end of one connection."""

    def __init__(self, link: PeerLink, slot: _Slot, number: int) -> None:
        super().__init__(link.me, link.peer_name, slot.waker, link.liveness, link.clock.now_s())
        self._link = link
        self._slot = slot
        self._number = number
        self._codec = ChunkCodec()
        self._refusal: ReasonPayload | None = None
        self._carried: dict[OutgoingFrame, PushedTransfer] = {}
        self.send(FrameHeader(FrameType.HELLO), link.me)

    def next_frame(self, now_s: float) -> OutgoingFrame | None:
        frame = self.next_control()
        if frame is not None or not self.welcomed:
            return frame
        frame = self._link.next_control(self._number)
        if frame is not None or self.finishing:
            return frame
        taken = self._link.next_chunk(self._number, self._codec)
        if taken is None:
            return None
        transfer, frame = taken
        self._carried[frame] = transfer
        return frame

    def frame_sent(self, frame: OutgoingFrame, now_s: float) -> None:
        super().frame_sent(frame, now_s)
        transfer = self._carried.pop(frame, None)
        if transfer is not None:
            transfer.frame_sent(frame)

    def control(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        self.heard(now_s)
        if header.type is FrameType.REFUSE:
            self._refusal = decode_payload(ReasonPayload, payload)
            raise TransportError(f"refused: {self._refusal.reason}: {self._refusal.detail}", reason="refused")
        if header.type is FrameType.WELCOME and not self.welcomed:
            self._welcome(decode_payload(HelloPayload, payload))
        elif not self.welcomed:
            raise ProtocolError(f"{header.type.name} before WELCOME", reason="bad_frame")
        else:
            self._for_transfer(header, payload, now_s)

    def chunk(self, header: FrameHeader, now_s: float) -> ChunkSink:
        raise ProtocolError("a decode worker sends no chunks", reason="bad_frame")

    def closed(self, error: Exception | None) -> None:
        if self.welcomed:
            self._slot.standing, self._slot.failed = False, True
            self._link.disconnected(self._number, error)
        elif isinstance(error, TransportInterruptedError):
            return
        else:
            self._slot.failed = True
            if self._refusal is not None:
                self._link.refused(self._refusal.reason, self._refusal.detail)
            elif isinstance(error, IdentityError | IncompatiblePeerError | ProtocolError):
                self._link.refused(error.reason, str(error))
        self._link.attempt_failed(error or TransportError("closed"))

    def _welcome(self, hello: HelloPayload) -> None:
        error = hello_problem(self.me, hello, self.peer_name)
        if error is not None:
            raise error
        self.peer_generation = hello.generation
        self.welcomed = True
        self._slot.standing, self._slot.failed = True, False
        self._link.connected(hello.generation)

    def _for_transfer(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        transfer = self._link.transfer(header.transfer)
        match header.type:
            case FrameType.PING | FrameType.PONG:
                round_trip_s = self.answered(header, now_s)
                if round_trip_s is not None:
                    self._link.round_trip(round_trip_s)
            case _ if transfer is None and header.type in _ANSWERS:
                pass  # it ended here meanwhile
            case FrameType.ACK | FrameType.NACK:
                assert transfer is not None
                transfer.chunk_answered(header, payload)
            case FrameType.ACCEPT:
                assert transfer is not None
                transfer.accepted(decode_payload(AcceptPayload, payload), self.peer_generation)
            case FrameType.COMPLETE:
                assert transfer is not None
                transfer.handle(PeerCompleted())
            case FrameType.FAIL:
                assert transfer is not None
                reason = decode_payload(ReasonPayload, payload)
                _log.warning("transfer_failed_by_peer", peer=self.peer_name, reason=reason.reason, detail=reason.detail)
                transfer.peer_failed(reason)
            case _:
                self.answered(header, now_s)


_ANSWERS = (FrameType.ACK, FrameType.NACK, FrameType.ACCEPT, FrameType.COMPLETE, FrameType.FAIL)


def hello_problem(me: HelloPayload, peer: HelloPayload, certified_name: str) -> FarfillError | None:
    """Why these two must not exchange KV; None when they may."""
    if peer.protocol_version != me.protocol_version:
        return IncompatiblePeerError(
            f"protocol version {peer.protocol_version} there, {me.protocol_version} here", reason="protocol_version"
        )
    if peer.instance != certified_name:
        return IncompatiblePeerError(
            f"calls itself {peer.instance[:64]!r}, its certificate says {certified_name!r}", reason="wrong_name"
        )
    if peer.fingerprint != me.fingerprint:
        return IncompatiblePeerError(
            f"model fingerprint {peer.fingerprint[:64]} there, {me.fingerprint[:64]} here",
            reason="fingerprint_mismatch",
        )
    return None
