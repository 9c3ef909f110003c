"""One expected transfer: the receiver machine, joined to a slot and to the connections that fill it.

Bytes go from the connection straight to their place in the slot, each chunk's through a `Landing`. Fencing revokes
every landing first, so once fenced nothing reaches the slot, however slow or hostile the peer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Protocol

from farfill.clock import Clock
from farfill.core.cluster import FallbackReason
from farfill.core.errors import ProtocolError
from farfill.core.layout import DTYPE_BYTES, TensorLayout
from farfill.core.ticket import Ticket
from farfill.engine.protocol import KVSlot
from farfill.kv.codec import Codec
from farfill.kv.lossy import RowGroups, row_groups
from farfill.kv.manifest import Manifest
from farfill.transfer.events import (
    Accept,
    Ack,
    ChunkAborted,
    ChunkBegun,
    ChunkLanded,
    DropChunk,
    Ended,
    Failed,
    Heard,
    LinkDown,
    LinkUp,
    Nack,
    Opened,
    PeerFailed,
    ReceiverEffect,
    ReceiverEvent,
    Resumed,
    RevokeClaim,
    SendComplete,
    SendFail,
    Tick,
    TransferLimits,
    WriteChunk,
)
from farfill.transfer.grid import pack_bitmap
from farfill.transfer.landing import Answerer, Landing, Scratch
from farfill.transfer.observer import TransferObserver
from farfill.transfer.protocol import ReceiveResult, TransferStats
from farfill.transfer.receiver_machine import ReceiverMachine
from farfill.wire.frames import (
    FLAG_CHECKSUM,
    AcceptPayload,
    FrameHeader,
    FrameType,
    Payload,
    ReasonPayload,
    transfer_key,
)

MIN_RATE_BYTES = 1024 * 1024


class Owner(Protocol):
    """The receiver, as transfers see it."""

    def tell(self, transfer: AwaitedTransfer, header: FrameHeader, payload: Payload | None) -> None:
        """Reach the sender on any connection it has."""
        ...

    def ended(self, transfer: AwaitedTransfer, outcome: Ended) -> None:
        """It is fenced."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOptions:
    """`chunk_limit_bytes` bounds what the sender proposes; `checksum`: chunks without one are refused.

    `lossy` is the only lossy form chunks may come in.
    """

    limits: TransferLimits
    chunk_limit_bytes: int
    checksum: bool
    lossy: Codec | None = None


class AwaitedTransfer:
    """Implements `ExpectedTransfer`."""

    def __init__(
        self,
        ticket: Ticket,
        slot: KVSlot,
        options: ReceiveOptions,
        owner: Owner,
        *,
        held: frozenset[int],
        clock: Clock,
        observer: TransferObserver,
    ) -> None:
        """`held` are pieces of `slot` that need not come."""
        self.key = transfer_key(ticket.transfer_id)
        self.ticket = ticket
        self.generation: str | None = None
        self._options = options
        self._owner = owner
        self._slot = slot
        self._clock = clock
        self._observer = observer
        self._lock = Lock()
        self._expected_s = clock.now_s()
        self._machine = ReceiverMachine(
            slot.manifest, held, options.limits, options.chunk_limit_bytes, self._expected_s
        )
        self._claims = count()
        self._landings: dict[int, Landing] = {}
        self._result: Future[ReceiveResult] = Future()
        self._progress_s = self._told_progress_s = self._expected_s
        self._first_byte_s = self._ended_s = self._expected_s
        self._raw_bytes = self._wire_bytes = self._chunks = self._resent = 0
        self._codecs: Counter[str] = Counter()
        self._carriers: set[Answerer] = set()

    # What the worker calls

    async def wait(self) -> ReceiveResult:
        """See `ExpectedTransfer`."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    def fail(self, reason: FallbackReason, detail: str) -> None:
        """See `ExpectedTransfer`. Idempotent. Raises ValueError for NONE, which is no failure."""
        if reason is FallbackReason.NONE:
            raise ValueError("a failure needs a reason")
        self.handle(Failed(reason, detail))
        self._fence()  # also when another thread is just ending it

    @property
    def rate_bytes_per_s(self) -> float | None:
        """What it reached from the first chunk to its end; None when that was too little to tell."""
        took_s = self._ended_s - self._first_byte_s
        return self._raw_bytes / took_s if self._raw_bytes >= MIN_RATE_BYTES and took_s > 0 else None

    # What the receiver calls

    def begin(self) -> None:
        """Look whether anything needs to come at all."""
        with self._lock:
            effects = self._machine.begin()
        self._apply(effects, None)

    @property
    def manifest(self) -> Manifest:
        """What shall arrive."""
        return self._slot.manifest

    @property
    def opened(self) -> bool:
        """Whether the sender showed its ticket."""
        return self._machine.grid is not None

    def open(self, chunk_bytes: int, session: Answerer) -> None:
        """A verified OPEN."""
        self.handle(Opened(chunk_bytes), session)

    def resume(self, session: Answerer) -> None:
        """The sender asks what arrived."""
        self.handle(Resumed(), session)

    def peer_failed(self, reason: FallbackReason, detail: str) -> None:
        """The sender gave up, or must not be listened to."""
        self.handle(PeerFailed(reason, detail))

    def heard(self) -> None:
        """KEEPALIVE."""
        self.handle(Heard())

    def link(self, *, up: bool, silent: bool = False) -> None:
        """The sender has a connection again, or none any more (`silent`: given up because nothing came)."""
        self.handle(LinkUp() if up else LinkDown(silent=silent))

    def tick(self) -> None:
        """Bytes of unfinished chunks count as a sign of life; then deadlines."""
        if self._progress_s != self._told_progress_s:
            self._told_progress_s = progress_s = self._progress_s
            with self._lock:
                self._machine.handle(Heard(), progress_s)
        self.handle(Tick())

    def landing(self, header: FrameHeader, session: Answerer, scratch: Scratch) -> Landing:
        """Where a CHUNK's payload goes. Raises ProtocolError when the manifest has no such chunk."""
        grid = self._machine.grid
        if grid is None:
            raise ProtocolError("CHUNK before OPEN", reason="bad_frame")
        if self._options.checksum and not header.flags & FLAG_CHECKSUM:
            raise ProtocolError("a chunk without checksum", reason="checksum_missing")
        codec = Codec(header.codec)
        if codec.lossy and (codec is not self._options.lossy or self.row_groups(header.piece) is None):
            raise ProtocolError(f"a chunk in {codec.name}, which was not agreed on", reason="lossy_mismatch")
        chunk = grid.find(header.piece, header.offset, header.raw_bytes)
        claim = next(self._claims)
        landing = Landing(self, header, chunk, claim, session=session, scratch=scratch)
        landing.prepare()
        with self._lock:
            effects = self._machine.handle(ChunkBegun(chunk.index, claim), self._clock.now_s())
            revoked = [self._landings.get(e.claim) for e in effects if isinstance(e, RevokeClaim)]
            for effect in effects:
                if isinstance(effect, WriteChunk):
                    buffer = self._slot.buffer(chunk.piece)
                    place = buffer.cast("B") if buffer.ndim != 1 or buffer.itemsize != 1 else buffer
                    landing.target = place[chunk.offset : chunk.offset + chunk.nbytes]
                    self._landings[claim] = landing
                    self._carriers.add(session)
                elif isinstance(effect, DropChunk):
                    landing.drop = effect
        for older in revoked:
            if older is not None:
                older.revoke()
        return landing

    def item_bytes(self, piece: int) -> int:
        """Item size of a piece's tensor, by our own layout."""
        return DTYPE_BYTES[self._tensor(piece).dtype]

    def row_groups(self, piece: int) -> RowGroups | None:
        """How a piece's numbers share scales, should it travel lossy; None when it may not."""
        return row_groups(self._tensor(piece))

    def _tensor(self, piece: int) -> TensorLayout:
        manifest = self._slot.manifest
        return manifest.layout.tensors[manifest.pieces[piece].tensor]

    def progressed(self) -> None:
        """Payload bytes came."""
        self._progress_s = self._clock.now_s()

    def landed(self, landing: Landing, problem: str | None) -> None:
        """The payload is whole."""
        with self._lock:
            self._landings.pop(landing.claim, None)
            event = ChunkLanded(landing.chunk.index, landing.claim, problem)
            effects = self._machine.handle(event, self._clock.now_s())
            if any(isinstance(effect, Ack) for effect in effects):
                self._account(landing)
        self._apply(effects, landing)

    def aborted(self, landing: Landing) -> None:
        """Its connection broke."""
        with self._lock:
            self._landings.pop(landing.claim, None)
        self.handle(ChunkAborted(landing.chunk.index, landing.claim))

    def dropped(self, landing: Landing, drop: DropChunk) -> None:
        """A chunk was discarded."""
        self._observer.dropped(drop.reason)
        if drop.acknowledge:
            with self._lock:
                self._resent += 1
            landing.answer(FrameType.ACK)

    def handle(self, event: ReceiverEvent, session: Answerer | None = None) -> None:
        """Feed the machine and do what it asks."""
        with self._lock:
            effects = self._machine.handle(event, self._clock.now_s())
        self._apply(effects, None, session)

    def _apply(
        self, effects: Sequence[ReceiverEffect], landing: Landing | None, session: Answerer | None = None
    ) -> None:
        for effect in effects:
            match effect:
                case Accept(chunk_bytes, held):
                    assert self._machine.grid is not None
                    payload = AcceptPayload(chunk_bytes, pack_bitmap(held, self._machine.grid.num_chunks))
                    self._tell(FrameHeader(FrameType.ACCEPT, self.key), payload, session)
                case Ack() if landing is not None:
                    landing.answer(FrameType.ACK)
                case Nack(_, reason) if landing is not None:
                    with self._lock:
                        self._resent += 1
                    self._observer.resent(reason)
                    landing.answer(FrameType.NACK, ReasonPayload(reason))
                case DropChunk() if landing is not None:
                    self.dropped(landing, effect)
                case SendComplete():
                    self._tell(FrameHeader(FrameType.COMPLETE, self.key))
                case SendFail(reason, detail):
                    self._tell(FrameHeader(FrameType.FAIL, self.key), ReasonPayload(str(reason), detail[:2048]))
                case Ended():
                    self._end(effect)
                case _:
                    pass

    def _tell(self, header: FrameHeader, payload: Payload | None = None, session: Answerer | None = None) -> None:
        if session is not None:
            session.send(header, payload)
        else:
            self._owner.tell(self, header, payload)

    def _account(self, landing: Landing) -> None:
        header = landing.header
        if not self._chunks:
            self._first_byte_s = self._clock.now_s()
        self._chunks += 1
        self._raw_bytes += header.raw_bytes
        self._wire_bytes += header.wire_bytes
        codec = Codec(header.codec).name.lower()
        self._codecs[codec] += header.raw_bytes
        self._observer.chunk_received(header.raw_bytes, header.wire_bytes, codec, self._tensor(header.piece).kind)

    def _fence(self) -> None:
        """Take the slot away from every thread; returns when none writes."""
        with self._lock:
            landings = list(self._landings.values())
        for landing in landings:
            landing.revoke()

    def _end(self, ended: Ended) -> None:
        self._ended_s = self._clock.now_s()
        self._fence()
        complete = ended.reason is FallbackReason.NONE
        stats = TransferStats(
            raw_bytes=self._raw_bytes,
            wire_bytes=self._wire_bytes,
            chunks=self._chunks,
            resent_chunks=self._resent,
            codec=self._codecs.most_common(1)[0][0] if self._codecs else Codec.NONE.name.lower(),
            connections=len(self._carriers),
            first_byte_s=self._first_byte_s - self._expected_s,
            total_s=self._ended_s - self._expected_s,
            after_prefill_s=0.0,
        )
        self._owner.ended(self, ended)
        self._result.set_result(
            ReceiveResult(
                complete=complete,
                prefix_tokens=self._machine.prefix_tokens,
                failure=ended.reason,
                detail=ended.detail,
                stats=stats,
                pieces=self._machine.pieces,
            )
        )
