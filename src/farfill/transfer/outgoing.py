"""One outgoing transfer: the sender machine, joined to the bytes the engine offers and to the link.

Chunks are read, checksummed and encoded when a connection asks for one, on the thread that serves it. `wait`
returns only when no thread reads the offered bytes any more: frames still leaving are detached (copied).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

import structlog
import xxhash

from farfill.clock import Clock
from farfill.core.cluster import FallbackReason
from farfill.core.errors import ProtocolError, TransferError
from farfill.core.layout import TensorLayout
from farfill.core.ticket import Ticket
from farfill.kv.codec import ChunkCodec, Codec
from farfill.kv.manifest import Manifest
from farfill.transfer.account import SentAccount
from farfill.transfer.encoder import EncodedChunk
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
    Nacked,
    Offered,
    PeerFailed,
    Pull,
    Resent,
    SendChunk,
    SendControl,
    SenderEffect,
    SenderEvent,
    SendFail,
    TransferLimits,
)
from farfill.transfer.grid import Chunk
from farfill.transfer.limits import fallback_reason, known_reason
from farfill.transfer.observer import TransferObserver
from farfill.transfer.protocol import TransferStats
from farfill.transfer.sender_machine import EARLY_REFUSED, SenderMachine
from farfill.transport.protocol import OutgoingFrame
from farfill.wire.frames import (
    FLAG_CHECKSUM,
    FLAG_EARLY,
    NO_CHECKSUM,
    AcceptPayload,
    FrameHeader,
    FrameType,
    OpenPayload,
    ReasonPayload,
    decode_payload,
    encode_frame,
    layout_payload,
    transfer_key,
)

_log = structlog.get_logger(__name__)


class Link(Protocol):
    """What a transfer needs of its link."""

    def queue_control(self, transfer: PushedTransfer, control: Control | ReasonPayload) -> None: ...

    def chunks_ready(self) -> None: ...

    def encode(self, raw: memoryview, tensor: TensorLayout, offset: int, codec: ChunkCodec) -> EncodedChunk:
        """What travels of the chunk at byte `offset` of a piece, and what the receiver will hold."""
        ...

    def reserve_early(self, chunk_bytes: int, total_bytes: int) -> int:
        """How many bytes may leave before ACCEPT; to be given back with `release_early`."""
        ...

    def release_early(self, nbytes: int, waited_s: float) -> None:
        """The transfer was accepted, or is over, so long after it began."""
        ...

    def sent(self, wire_bytes: int) -> None: ...

    def settled(self, wire_bytes: int, raw_bytes: int) -> None:
        """Bytes reported by `sent` are no longer outstanding; `raw_bytes` of them arrived."""
        ...

    def ended(self, transfer: PushedTransfer) -> None: ...

    def measured(self) -> tuple[float | None, float | None]:
        """(bytes/s, round trip in s), as far as known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """`chunk_bytes` and `lossy` are what OPEN says; `checksum`: XXH3-128 of a chunk as the receiver will hold it."""

    limits: TransferLimits
    chunk_bytes: int
    checksum: bool
    lossy: str = "none"


@dataclass(frozen=True, slots=True)
class _Order:
    """A chunk to send and the offered bytes it is."""

    chunk: Chunk
    raw: memoryview
    send: SendChunk


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The frame of a chunk, with the codec really used."""

    frame: OutgoingFrame
    wire_bytes: int
    codec: Codec


class PushedTransfer:
    """Implements `OutgoingTransfer`. `connection` arguments are the link's numbers of connections."""

    def __init__(
        self,
        ticket: Ticket,
        token: str,
        manifest: Manifest,
        options: SendOptions,
        *,
        link: Link,
        clock: Clock,
        observer: TransferObserver,
    ) -> None:
        self.key = transfer_key(ticket.transfer_id)
        self.ticket = ticket
        self._token = token
        self._manifest = manifest
        self._link = link
        self._clock = clock
        self._observer = observer
        self._options = options
        self._lock = Lock()
        self._began_s = clock.now_s()
        self._machine = SenderMachine(manifest, options.limits, self._began_s)
        self._bytes: dict[int, memoryview] = {}
        self._readers = 0
        self._detached = False
        self._leaving: dict[OutgoingFrame, int] = {}
        self._unsettled: dict[int, int] = {}
        self._early_bytes = 0
        self._generation: str | None = None
        self._outcome: Future[Ended] = Future()
        self._account = SentAccount(self._began_s)

    # What the worker calls

    def offer(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """See `OutgoingTransfer`."""
        with self._lock:
            if self._machine.ended is not None:
                return
            for index, data in pieces:
                view = data.cast("B") if data.ndim != 1 or data.itemsize != 1 else data
                expected = self._manifest.pieces[index].nbytes if index < len(self._manifest.pieces) else -1
                if len(view) != expected:
                    event: SenderEvent = Failed(
                        FallbackReason.PROTOCOL, f"piece {index} has {len(view)} bytes, the manifest says {expected}"
                    )
                    break
                self._bytes.setdefault(index, view)
            else:
                event = Offered(tuple(index for index, _ in pieces))
        self.handle(event)

    def keepalive(self) -> None:
        """See `OutgoingTransfer`."""
        self.handle(Heard())

    def finish(self) -> None:
        """See `OutgoingTransfer`."""
        self._account.finish_called_s = self._clock.now_s()
        self.handle(Finished())

    def fail(self, reason: FallbackReason, detail: str) -> None:
        """See `OutgoingTransfer`. Raises ValueError for NONE, which is no failure."""
        if reason is FallbackReason.NONE:
            raise ValueError("a failure needs a reason")
        self.handle(Failed(reason, detail))

    async def wait(self) -> TransferStats:
        """See `OutgoingTransfer`. The error's reason is a `FallbackReason` value."""
        ended = await asyncio.shield(asyncio.wrap_future(self._outcome))
        if ended.reason is not FallbackReason.NONE:
            raise TransferError(ended.detail or str(ended.reason), reason=str(ended.reason))
        rate, rtt_s = self._link.measured()
        return replace(self.stats(), link_bytes_per_s=rate, link_rtt_s=rtt_s)

    def stats(self) -> TransferStats:
        """The account so far."""
        with self._lock:
            return self._account.stats()

    # What the link calls

    def begin(self) -> None:
        """Ask for the OPEN to be sent; chunks may follow it at once as far as the receiver granted that."""
        chunk_bytes = self._options.chunk_bytes
        total_bytes = self._manifest.total_bytes
        early_bytes = 0 if self.ticket.continues else self._link.reserve_early(chunk_bytes, total_bytes)
        with self._lock:
            self._early_bytes = early_bytes
            effects = self._machine.begin(chunk_bytes, early_bytes)
        self._apply(effects)
        if self._machine.ended is not None:
            self._release_early()

    def has_chunks(self, *, early: bool = True) -> bool:
        """Whether `pull` may yield one; `early`: on a connection that may carry chunks before ACCEPT."""
        return self._machine.has_chunks(early=early)

    def control_frame(self, control: Control | ReasonPayload, connection: int) -> OutgoingFrame | None:
        """The frame of a queued control, about to leave on `connection`; None when it no longer matters."""
        if isinstance(control, ReasonPayload):
            return OutgoingFrame(encode_frame(FrameHeader(FrameType.FAIL, self.key), control))
        if self._machine.ended is not None:
            return None
        self.handle(ControlSent(control, connection))
        if control is not Control.OPEN:
            return OutgoingFrame(encode_frame(FrameHeader(FrameType[control.name], self.key)))
        layout = self._manifest.layout
        payload = OpenPayload(
            self._token,
            self._manifest.digest,
            self._manifest.num_tokens,
            layout.version,
            layout.prefill_chunk_tokens,
            self._options.chunk_bytes,
            layout_payload(layout),
            self._options.lossy,
        )
        return OutgoingFrame(encode_frame(FrameHeader(FrameType.OPEN, self.key), payload))

    @property
    def chunk_bytes(self) -> int:
        """The largest chunk of the cut in force; 0 before there is one."""
        return 0 if self._machine.grid is None else self._machine.grid.chunk_bytes

    @property
    def waiting_chunks(self) -> int:
        """So many wait to be pulled."""
        return self._machine.waiting

    @property
    def awaits_pieces(self) -> bool:
        """Whether `finish` was not called yet."""
        return self._machine.awaits_pieces

    @property
    def waiting_bytes(self) -> int:
        """About so much waits to be pulled."""
        return self._machine.waiting * self.chunk_bytes

    def overdue_on(self, connection: int) -> frozenset[int]:
        """Connections on which chunks are overdue; should they be stuck, `pull` by this one may take those over."""
        with self._lock:
            return self._machine.overdue_on(connection, self._clock.now_s())

    def pull(self, pull: Pull, codec: ChunkCodec) -> OutgoingFrame | None:
        """The next chunk as a frame for the pulling connection, or None."""
        try:
            return self._pull(pull, codec)
        except Exception as error:
            # Memory that went away, or is short: this transfer's end, but no other's on the same connection.
            _log.exception("transfer_bytes_unreadable", transfer_id=self.ticket.transfer_id)
            self.fail(FallbackReason.PREFILL_FAILED, f"the KV to send cannot be read: {error}")
            return None

    def _pull(self, pull: Pull, codec: ChunkCodec) -> OutgoingFrame | None:
        order = self._take(pull)
        if order is None:
            return None
        encoded: _Encoded | None = None
        try:
            encoded = self._encode(order, codec)
        finally:
            with self._lock:
                self._readers -= 1
                if self._machine.ended is not None:
                    encoded = None
                if encoded is not None:
                    self._leaving[encoded.frame] = pull.connection
                    self._unsettled[order.chunk.index] = encoded.wire_bytes
                    self._link.sent(encoded.wire_bytes)
                    self._account.sent(
                        order.chunk, encoded.wire_bytes, encoded.codec, pull.connection, self._clock.now_s()
                    )
            self._resolve()
        if encoded is None:
            return None
        kind = self._tensor(order.chunk).kind
        self._observer.chunk_sent(order.chunk.nbytes, encoded.wire_bytes, encoded.codec.name.lower(), kind)
        return encoded.frame

    def frame_sent(self, frame: OutgoingFrame) -> None:
        """The kernel has it: the offered bytes are no longer read."""
        with self._lock:
            self._leaving.pop(frame, None)

    def connection_lost(self, connection: int) -> None:
        """Its unacknowledged chunks go out again elsewhere."""
        with self._lock:
            for frame in [f for f, carrier in self._leaving.items() if carrier == connection]:
                del self._leaving[frame]
        self.handle(ConnectionLost(connection))

    def accepted(self, payload: AcceptPayload, generation: str) -> None:
        """ACCEPT arrived from that run of the peer."""
        self._generation = generation
        with self._lock:
            if self._machine.grid is not None and self._machine.grid.chunk_bytes != payload.chunk_bytes:
                self._account.recut()
        self.handle(Accepted(payload.chunk_bytes, payload.held))
        self._release_early()

    def peer_is(self, generation: str) -> None:
        """A connection now stands to that run of the peer."""
        if self._generation not in (None, generation):
            self.handle(PeerFailed(FallbackReason.LINK_LOST, "the decode worker was restarted"))

    def chunk_answered(self, header: FrameHeader, payload: memoryview, connection: int) -> None:
        """ACK or NACK on `connection`. Raises ProtocolError when it names no chunk."""
        grid = self._machine.grid
        if grid is None:
            raise ProtocolError(f"{header.type.name} before ACCEPT", reason="bad_frame")
        if header.type is FrameType.ACK:
            found = grid.find(header.piece, header.offset)
            with self._lock:
                wire_bytes = self._unsettled.pop(found.index, 0)
            self._link.settled(wire_bytes, found.nbytes)
            if wire_bytes:
                self._observer.chunk_confirmed(connection, wire_bytes)
            self.handle(Acked(found.index))
            return
        reason = known_reason(decode_payload(ReasonPayload, payload).reason)
        if reason == EARLY_REFUSED and self._machine.accepted and header.offset % grid.chunk_bytes:
            return  # of the cut before ACCEPT
        self.handle(Nacked(grid.find(header.piece, header.offset).index, header.attempt, reason))

    def peer_failed(self, payload: ReasonPayload) -> None:
        """FAIL or REFUSE arrived."""
        detail = payload.detail if payload.reason == str(fallback_reason(payload.reason)) else ""
        self.handle(PeerFailed(fallback_reason(payload.reason), detail or f"{payload.reason}: {payload.detail}"))

    def link_down(self, detail: str) -> None:
        """No connection stands, and trying failed."""
        self.handle(LinkDown(detail))

    def handle(self, event: SenderEvent) -> None:
        """Feed the machine and do what it asks."""
        with self._lock:
            effects = self._machine.handle(event, self._clock.now_s())
        self._apply(effects)

    def _apply(self, effects: Sequence[SenderEffect]) -> None:
        for effect in effects:
            match effect:
                case SendControl(control):
                    self._link.queue_control(self, control)
                case SendFail(reason, detail):
                    self._link.queue_control(self, ReasonPayload(str(reason), detail[:2048]))
                case ChunksReady():
                    self._link.chunks_ready()
                case Resent(chunk, reason):
                    self._settle_resent(chunk, reason)
                case Confirmed(chunk):
                    self._settle_confirmed(chunk)
                case Ended():
                    self._end()
                case SendChunk():
                    pass  # the pulling thread encodes it

    def _settle_resent(self, chunk: int, reason: str) -> None:
        with self._lock:
            wire_bytes = self._unsettled.pop(chunk, 0)
            self._account.resent(chunk, reason, self._clock.now_s())
        self._link.settled(wire_bytes, 0)
        self._observer.resent(reason)

    def _settle_confirmed(self, chunk: int) -> None:
        grid = self._machine.grid
        assert grid is not None
        with self._lock:
            wire_bytes = self._unsettled.pop(chunk, 0)
        self._link.settled(wire_bytes, grid.chunk(chunk).nbytes)

    def _take(self, pull: Pull) -> _Order | None:
        """The next chunk to read; the caller is a reader of the offered bytes from now on."""
        with self._lock:
            effects = self._machine.handle(pull, self._clock.now_s())
            send = next((e for e in effects if isinstance(e, SendChunk)), None)
            order: _Order | None = None
            if send is not None:
                assert self._machine.grid is not None
                chunk = self._machine.grid.chunk(send.chunk)
                raw = self._bytes[chunk.piece][chunk.offset : chunk.offset + chunk.nbytes].toreadonly()
                order = _Order(chunk, raw, send)
                self._readers += 1
        self._apply(effects)
        return order

    def _encode(self, order: _Order, codec: ChunkCodec) -> _Encoded:
        chunk, raw = order.chunk, order.raw
        encoded = self._link.encode(raw, self._tensor(chunk), chunk.offset, codec)
        header = FrameHeader(
            FrameType.CHUNK,
            self.key,
            chunk.piece,
            chunk.offset,
            chunk.nbytes,
            len(encoded.wire),
            encoded.codec,
            (FLAG_CHECKSUM if self._options.checksum else 0) | (FLAG_EARLY if order.send.early else 0),
            xxhash.xxh3_128_digest(encoded.held) if self._options.checksum else NO_CHECKSUM,
            order.send.attempt,
        )
        return _Encoded(OutgoingFrame(header.pack(), memoryview(encoded.wire)), len(encoded.wire), encoded.codec)

    def _tensor(self, chunk: Chunk) -> TensorLayout:
        return self._manifest.layout.tensors[self._manifest.pieces[chunk.piece].tensor]

    def _release_early(self) -> None:
        with self._lock:
            nbytes, self._early_bytes = self._early_bytes, 0
        if nbytes:
            self._link.release_early(nbytes, self._clock.now_s() - self._began_s)

    def _end(self) -> None:
        self._account.ended_s = self._clock.now_s()
        self._link.ended(self)
        self._release_early()
        with self._lock:
            leaving = list(self._leaving)
            unsettled, self._unsettled = sum(self._unsettled.values()), {}
        self._link.settled(unsettled, 0)
        for frame in leaving:
            frame.detach()
        self._detached = True
        self._resolve()

    def _resolve(self) -> None:
        """Let `wait` return once nothing reads the offered bytes."""
        with self._lock:
            ended = self._machine.ended
            if ended is None or not self._detached or self._readers or self._outcome.done():
                return
            self._bytes.clear()
            self._outcome.set_result(ended)
