"""What the sender says and hears on one connection, whichever end dialled it."""

from __future__ import annotations

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
from farfill.transport.errors import IdentityError, TransportError, TransportInterruptedError
from farfill.transport.protocol import ChunkSink, OutgoingFrame, PathSample
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import (
    ANSWERS_OPEN,
    AcceptPayload,
    EarlyGrant,
    FrameHeader,
    FrameType,
    HelloPayload,
    ReasonPayload,
    decode_payload,
)

_log = structlog.get_logger(__name__)


class Place(Protocol):
    """The pool's record of the connection."""

    waker: Waker
    number: int
    failed: bool
    standing: bool

    def over(self) -> None:
        """The connection ended."""
        ...


class Pool(Protocol):
    """The link, as its connections see it."""

    peer_name: str
    me: HelloPayload
    clock: Clock
    config: KVTransferConfig
    liveness: Liveness

    @property
    def unsent_bytes(self) -> int: ...

    @property
    def busy(self) -> bool: ...

    def transfer(self, key: bytes) -> PushedTransfer | None: ...

    def next_control(self, connection: int) -> OutgoingFrame | None: ...

    def next_chunk(
        self, connection: int, codec: ChunkCodec, *, early: bool
    ) -> tuple[PushedTransfer, OutgoingFrame] | None: ...

    def connected(self, generation: str) -> None: ...

    def disconnected(self, connection: int, error: Exception | None) -> None: ...

    def attempt_failed(self, error: Exception) -> None: ...

    def refused(self, reason: str, detail: str) -> None: ...

    def round_trip(self, seconds: float) -> None: ...

    def credit(self, nbytes: int, grant: EarlyGrant) -> None: ...

    def sampled(self, connection: int, path: PathSample) -> None: ...


class SenderSession(PeerSession):
    """Full duplex: chunks and questions out, answers in."""

    def __init__(self, pool: Pool, slot: Place, peer: PeerIdentity) -> None:
        super().__init__(pool.me, pool.peer_name, slot.waker, pool.liveness, pool.clock.now_s())
        self._pool = pool
        self._slot = slot
        self._peer = peer
        self._codec = ChunkCodec()
        self._refusal: ReasonPayload | None = None
        self._early = False
        self._carried: dict[OutgoingFrame, PushedTransfer] = {}
        self.send(FrameHeader(FrameType.HELLO), pool.me)

    def next_frame(self, now_s: float) -> OutgoingFrame | None:
        frame = self.next_control()
        if frame is not None or not self.welcomed:
            return frame
        frame = self._pool.next_control(self._slot.number)
        if frame is not None or self.finishing:
            return frame
        taken = self._pool.next_chunk(self._slot.number, self._codec, early=self._early)
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

    @property
    def busy(self) -> bool:
        return self._pool.busy

    @property
    def unsent_bytes(self) -> int:
        return self._pool.unsent_bytes

    def sampled(self, path: PathSample) -> None:
        self._pool.sampled(self._slot.number, path)

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

    def chunk(self, header: FrameHeader, now_s: float) -> ChunkSink | None:
        raise ProtocolError("a decode worker sends no chunks", reason="bad_frame")

    def closed(self, error: Exception | None) -> None:
        if self.welcomed:
            self._slot.standing, self._slot.failed = False, True
            self._pool.disconnected(self._slot.number, error)
        elif isinstance(error, TransportInterruptedError):
            self._slot.over()
            return
        else:
            self._slot.failed = True
            if self._refusal is not None:
                self._pool.refused(self._refusal.reason, self._refusal.detail)
            elif isinstance(error, IdentityError | IncompatiblePeerError | ProtocolError):
                self._pool.refused(error.reason, str(error))
        self._pool.attempt_failed(error or TransportError("closed"))
        self._slot.over()

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
                grant = decode_payload(EarlyGrant, payload) if len(payload) else EarlyGrant()
                self._early = grant.early_bytes > 0
                self._pool.credit(header.offset, grant)
            case _ if transfer is None and header.type in _ANSWERS:
                pass  # it ended here meanwhile
            case FrameType.ACK | FrameType.NACK:
                assert transfer is not None
                transfer.chunk_answered(header, payload, self._slot.number)
            case FrameType.ACCEPT:
                assert transfer is not None
                transfer.accepted(decode_payload(AcceptPayload, payload), self.peer_generation)
            case FrameType.COMPLETE:
                assert transfer is not None
                transfer.handle(PeerCompleted(header.attempt == ANSWERS_OPEN))
            case FrameType.FAIL:
                assert transfer is not None
                reason = decode_payload(ReasonPayload, payload)
                _log.warning("transfer_failed_by_peer", peer=self.peer_name, reason=reason.reason, detail=reason.detail)
                transfer.peer_failed(reason)
            case _:
                self.answered(header, now_s)


_ANSWERS = (FrameType.ACK, FrameType.NACK, FrameType.ACCEPT, FrameType.COMPLETE, FrameType.FAIL)
