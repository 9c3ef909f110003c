"""One chunk on its way from a connection into a slot, or nowhere.

Each write happens under the lock of the landing, and whoever takes its place away waits for that lock: a landing that
lost its place drains into scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Protocol

import xxhash

from farfill.core.errors import ProtocolError
from farfill.kv.codec import ChunkCodec, Codec
from farfill.kv.lossy import RowGroups, decode_lossy_into
from farfill.transfer.budget import ReceiveBudget
from farfill.transfer.events import DropChunk
from farfill.transfer.grid import Chunk
from farfill.transport.errors import TransportError
from farfill.transport.protocol import Receive
from farfill.wire.frames import FLAG_CHECKSUM, FrameHeader, FrameType, Payload, ReasonPayload

DRAIN_BYTES = 64 * 1024


class Answerer(Protocol):
    """The connection a frame came from."""

    def send(self, header: FrameHeader, payload: Payload | None = None) -> None: ...

    def bytes_came(self) -> None: ...


class Destination(Protocol):
    """The transfer, as its landings see it."""

    def progressed(self) -> None:
        """Payload bytes came."""
        ...

    def landed(self, landing: Landing, problem: str | None) -> None:
        """The payload is whole; `problem`: why it is worthless all the same."""
        ...

    def aborted(self, landing: Landing) -> None:
        """Its connection broke."""
        ...

    def dropped(self, landing: Landing, drop: DropChunk) -> None:
        """The payload was discarded."""
        ...

    def item_bytes(self, piece: int) -> int:
        """Item size of a piece's tensor."""
        ...

    def row_groups(self, piece: int) -> RowGroups | None:
        """How a piece's numbers share scales, should it travel lossy."""
        ...


class Scratch:
    """What one connection needs: codec contexts, room to discard, and leases of memory for encoded chunks."""

    def __init__(self, budget: ReceiveBudget, peer: str, patience_s: float) -> None:
        self.codec = ChunkCodec()
        self.drain = memoryview(bytearray(DRAIN_BYTES))
        self._budget = budget
        self._peer = peer
        self._patience_s = patience_s
        self._ready: bytearray | None = None
        self._short_since_s: float | None = None

    def has_room(self, nbytes: int, retry: Callable[[], None], now_s: float) -> bool:
        """Whether the next `lease` of `nbytes` finds room; if not, `retry` is called when that may have changed.

        Raises TransportError (receive_budget) when there was none for too long.
        """
        if self._ready is not None and len(self._ready) < nbytes:
            self.release(self._ready)
            self._ready = None
        if self._ready is None:
            self._ready = self._budget.lease(self._peer, nbytes, retry)
        if self._ready is not None:
            self._short_since_s = None
            return True
        if self._short_since_s is None:
            self._short_since_s = now_s
        if now_s - self._short_since_s >= self._patience_s:
            raise TransportError(f"no memory for {nbytes} bytes came free", reason="receive_budget")
        return False

    def lease(self) -> bytearray:
        """The room for one encoded chunk that `has_room` found."""
        assert self._ready is not None
        memory, self._ready = self._ready, None
        return memory

    def close(self) -> None:
        """Give back what nobody leased."""
        if self._ready is not None:
            self.release(self.lease())

    def release(self, memory: bytearray) -> None:
        """It is decoded, or nobody needs it any more."""
        self._budget.release(self._peer, memory)


class Landing:
    """The payload of one CHUNK on its way into the slot (`target`) or nowhere. One thread fills, any revokes."""

    def __init__(
        self,
        transfer: Destination,
        header: FrameHeader,
        chunk: Chunk,
        claim: int,
        *,
        session: Answerer,
        scratch: Scratch,
    ) -> None:
        self.header = header
        self.chunk = chunk
        self.claim = claim
        self.target: memoryview | None = None
        self.drop: DropChunk | None = None
        self._transfer = transfer
        self._session = session
        self._scratch = scratch
        self._lock = Lock()
        self._filled = 0
        self._encoded: bytearray | None = None

    @property
    def remaining(self) -> int:
        return self.header.wire_bytes - self._filled

    def prepare(self) -> None:
        """Take the memory for the encoded bytes, which `Scratch.has_room` has found."""
        if self.header.codec != Codec.NONE:
            self._encoded = self._scratch.lease()

    def fill(self, receive: Receive) -> int | None:
        with self._lock:
            if self._encoded is not None:
                place = memoryview(self._encoded)[self._filled : self.header.wire_bytes]
            elif self.target is not None:
                place = self.target[self._filled :]
            else:
                place = self._scratch.drain[: self.remaining]
            received = receive(place)
        if received:
            self._filled += received
            self._transfer.progressed()
            self._session.bytes_came()
        return received

    def complete(self) -> None:
        with self._lock:
            problem = None if self.target is None else self._verify(self.target)
            self.target = None
            self._give_back()
        if self.drop is not None:
            self._transfer.dropped(self, self.drop)
        else:
            self._transfer.landed(self, problem)

    def abandon(self) -> None:
        with self._lock:
            self.target = None
            self._give_back()
        if self.drop is None:
            self._transfer.aborted(self)

    def revoke(self) -> None:
        """Returns once no byte can reach the slot through this any more."""
        with self._lock:
            self.target = None

    def _give_back(self) -> None:
        if self._encoded is not None:
            self._scratch.release(self._encoded)
            self._encoded = None

    def answer(self, kind: FrameType, payload: ReasonPayload | None = None) -> None:
        """ACK or NACK of this chunk."""
        header = self.header
        self._session.send(
            FrameHeader(kind, header.transfer, header.piece, header.offset, attempt=header.attempt), payload
        )

    def _verify(self, target: memoryview) -> str | None:
        header = self.header
        if self._encoded is not None:
            try:
                self._decode(memoryview(self._encoded)[: header.wire_bytes], target)
            except ProtocolError:
                return "checksum"  # the bytes are wrong, found before the checksum was needed
        if header.flags & FLAG_CHECKSUM and xxhash.xxh3_128_digest(target) != header.checksum:
            return "checksum"
        return None

    def _decode(self, wire: memoryview, target: memoryview) -> None:
        """Raises ProtocolError unless `wire` fills `target` exactly."""
        codec, piece = Codec(self.header.codec), self.header.piece
        groups = self._transfer.row_groups(piece) if codec.lossy else None
        if groups is not None:
            decode_lossy_into(codec, wire, groups, self.header.offset, target)
        else:
            self._scratch.codec.decode_into(codec, wire, self._transfer.item_bytes(piece), target)
