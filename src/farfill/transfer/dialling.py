"""The sender's end of its connections: one thread each that dials, serves and dials again, with backoff and jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from threading import Thread
from typing import Protocol

import structlog

from farfill.clock import Clock
from farfill.config.model import KVTransferConfig
from farfill.core.errors import IncompatiblePeerError, ProtocolError
from farfill.kv.codec import ChunkCodec
from farfill.transfer.events import PeerCompleted
from farfill.transfer.hello import hello_problem
from farfill.transfer.limits import Liveness
from farfill.transfer.outgoing import PushedTransfer
from farfill.transfer.session import PeerSession
from farfill.transport.connection import Connection
from farfill.transport.errors import (
    IdentityError,
    TransportError,
    TransportInterruptedError,
    TransportTimeoutError,
)
from farfill.transport.protocol import Channel, ChunkSink, OutgoingFrame, PathSample, Transport
from farfill.transport.tls import PeerIdentity
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
# While a transfer waits for a link that stood before, so that it goes on soon after the link is back.
BACKOFF_MAX_WANTED_S = 0.2
# Without a transfer to serve, an unreachable peer is left alone after so many attempts per connection.
IDLE_DIALS = 3
# A SYN that got lost is repeated by the kernel after a second only: a new attempt is sooner.
CONNECT_MIN_S = 0.4
CONNECT_ROUND_TRIPS = 8
SAMPLE_S = 0.1
# Nothing confirmed for so long although something is on its way: the connection is given up.
STALLED_MIN_S = 1.2
STALLED_ROUND_TRIPS = 10

_log = structlog.get_logger(__name__)


class Pool(Protocol):
    """The link, as its connections see it."""

    address: str
    peer_name: str
    me: HelloPayload
    transport: Transport
    clock: Clock
    config: KVTransferConfig
    liveness: Liveness

    @property
    def wanted(self) -> bool: ...

    @property
    def rtt_s(self) -> float | None: ...

    def transfer(self, key: bytes) -> PushedTransfer | None: ...

    def next_control(self, connection: int) -> OutgoingFrame | None: ...

    def next_chunk(self, connection: int, codec: ChunkCodec) -> tuple[PushedTransfer, OutgoingFrame] | None: ...

    def connected(self, generation: str) -> None: ...

    def disconnected(self, connection: int, error: Exception | None) -> None: ...

    def attempt_failed(self, error: Exception) -> None: ...

    def refused(self, reason: str, detail: str) -> None: ...

    def round_trip(self, seconds: float) -> None: ...

    def credit(self, nbytes: int) -> None: ...

    def sampled(self, connection: int, path: PathSample) -> None: ...


class Slot:
    """One connection of the pool over its whole life, on its own thread."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.waker = Waker()
        self.failed = False
        self.standing = False
        self.number = number
        self._pool = pool
        self._retry_now = False
        self._stopping = False
        self._session: DiallerSession | None = None
        self.thread = Thread(target=self._run, name=f"farfill-kv-send-{pool.peer_name}-{number}", daemon=True)

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
                if failures >= IDLE_DIALS and not self._pool.wanted:
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
        try:
            channel = self._dial()
        except TransportInterruptedError:
            return False
        except TransportError as error:
            self.failed = True
            if isinstance(error, IdentityError):
                self._pool.refused(error.reason, str(error))
            self._pool.attempt_failed(error)
            return False
        session = DiallerSession(self._pool, self, channel.peer)
        self._session = session
        if self._stopping:
            session.finish()
        Connection(channel, session, self.waker, self._pool.clock).run()
        self._session = None
        return session.welcomed

    def _dial(self) -> Channel:
        pool = self._pool
        rtt_s = pool.rtt_s
        channel = pool.transport.dial(
            pool.address,
            timeout_s=pool.liveness.handshake_s,
            connect_s=None if rtt_s is None else max(CONNECT_MIN_S, CONNECT_ROUND_TRIPS * rtt_s),
            interrupt=self.waker,
        )
        if channel.peer.name != pool.peer_name:
            channel.close()
            raise IdentityError(f"{pool.address} is {channel.peer.name!r}, not {pool.peer_name!r}")
        return channel

    def _back_off(self, failures: int) -> None:
        """Wait longer each time, by chance a little more or less; a new transfer cuts it short."""
        longest_s = BACKOFF_MAX_WANTED_S if self._pool.wanted and self._pool.rtt_s is not None else BACKOFF_MAX_S
        wait_s = min(BACKOFF_FIRST_S * 2 ** (failures - 1), longest_s) * random.uniform(0.5, 1.5)  # noqa: S311
        until_s = time.monotonic() + wait_s
        while not (self._retry_now or self._stopping or self.waker.stopped):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self.waker.sleep(left_s)


class DiallerSession(PeerSession):
    """What one such connection says and hears."""

    def __init__(self, pool: Pool, slot: Slot, peer: PeerIdentity) -> None:
        super().__init__(pool.me, pool.peer_name, slot.waker, pool.liveness, pool.clock.now_s())
        self._pool = pool
        self._slot = slot
        self._peer = peer
        self._codec = ChunkCodec()
        self._refusal: ReasonPayload | None = None
        self._carried: dict[OutgoingFrame, PushedTransfer] = {}
        self._sampled_s = float("-inf")
        self.send(FrameHeader(FrameType.HELLO), pool.me)

    def next_frame(self, now_s: float) -> OutgoingFrame | None:
        frame = self.next_control()
        if frame is not None or not self.welcomed:
            return frame
        frame = self._pool.next_control(self._slot.number)
        if frame is not None or self.finishing:
            return frame
        taken = self._pool.next_chunk(self._slot.number, self._codec)
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

    def tick(self, now_s: float, path: Callable[[], PathSample | None]) -> float:
        if self.welcomed and now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now_s
            sample = path()
            if sample is not None:
                self._pool.sampled(self._slot.number, sample)
                if sample.silent_s > max(STALLED_MIN_S, STALLED_ROUND_TRIPS * sample.rtt_s):
                    raise TransportTimeoutError(f"the peer's host confirmed nothing for {sample.silent_s:.1f} s")
        return min(super().tick(now_s, path), SAMPLE_S if self._carried else 1.0)

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
            self._pool.disconnected(self._slot.number, error)
        elif isinstance(error, TransportInterruptedError):
            return
        else:
            self._slot.failed = True
            if self._refusal is not None:
                self._pool.refused(self._refusal.reason, self._refusal.detail)
            elif isinstance(error, IdentityError | IncompatiblePeerError | ProtocolError):
                self._pool.refused(error.reason, str(error))
        self._pool.attempt_failed(error or TransportError("closed"))

    def _welcome(self, hello: HelloPayload) -> None:
        error = hello_problem(self.me, hello, self._peer, self._pool.config.allowed_peers)
        if error is not None:
            raise error
        self.peer_generation = hello.generation
        self.welcomed = True
        self._slot.standing, self._slot.failed = True, False
        self._pool.connected(hello.generation)

    def _for_transfer(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        transfer = self._pool.transfer(header.transfer)
        match header.type:
            case FrameType.PING | FrameType.PONG:
                round_trip_s = self.answered(header, now_s)
                if round_trip_s is not None:
                    self._pool.round_trip(round_trip_s)
            case FrameType.CREDIT:
                self._pool.credit(header.offset)
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
