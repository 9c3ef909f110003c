"""Chunks that come before the OPEN of their transfer is served: they wait in bounded memory, outside of any slot.

A sender may send within its grant before it sees ACCEPT, so chunks overtake OPEN on other connections, and OPEN may
have to wait for the worker to expect it. Such chunks get memory of the receive budget, at most a quarter of the
sender's share. Once the OPEN passed every check they go the way of all others: placed, verified, answered. What finds
no memory, is cut otherwise, or waits too long is answered with NACK `early_refused`, and nothing of it is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from farfill.core.errors import ProtocolError
from farfill.transfer.budget import ReceiveBudget
from farfill.transport.protocol import ChunkSink, Receive
from farfill.wire.frames import FrameHeader, FrameType, Payload, ReasonPayload

REFUSED = "early_refused"
SHARE = 4  # of a sender's share of the budget, one part in so many
MAX_TURNED_AWAY = 1024
MAX_CHUNKS = 4096  # of one sender
_DRAIN_BYTES = 64 * 1024


class Carrier(Protocol):
    """The connection that a chunk comes on."""

    peer_name: str
    peer_generation: str

    def send(self, header: FrameHeader, payload: Payload | None = None) -> None: ...

    def bytes_came(self) -> None: ...

    def dropped(self, reason: str) -> None: ...

    def place(self, chunk: Waiting) -> None:
        """Put it where it belongs, on the thread of this connection; `EarlyChunks.drop` it when it is closed."""
        ...


# Who sent it, in which run, and for which transfer.
Key = tuple[str, str, bytes]


def key_of(carrier: Carrier, transfer: bytes) -> Key:
    """Whose chunk it is."""
    return carrier.peer_name, carrier.peer_generation, transfer


@dataclass(frozen=True, slots=True)
class Waiting:
    """A whole chunk in memory of the budget."""

    header: FrameHeader
    carrier: Carrier
    memory: bytearray
    until_s: float

    def pour(self, sink: ChunkSink) -> None:
        """Hand the payload to where it belongs."""
        position = 0

        def receive(place: memoryview) -> int:
            nonlocal position
            count = min(len(place), self.header.wire_bytes - position)
            place[:count] = memoryview(self.memory)[position : position + count]
            position += count
            return count

        try:
            while sink.remaining:
                sink.fill(receive)
        except BaseException:
            sink.abandon()
            raise
        sink.complete()


class EarlyChunks:
    """Thread-safe. `now_s` and `patience_s`: how long a chunk waits for its transfer."""

    def __init__(self, budget: ReceiveBudget, patience_s: float, now_s: Callable[[], float]) -> None:
        self._budget = budget
        self._patience_s = patience_s
        self._now_s = now_s
        self._lock = Lock()
        self._waiting: dict[Key, list[Waiting]] = {}
        self._held: dict[str, int] = {}
        self._chunks: Counter[str] = Counter()
        self._turned_away: dict[Key, float] = {}

    @property
    def held_bytes(self) -> int:
        """Memory in use; 0 when nothing waits."""
        with self._lock:
            return sum(self._held.values())

    def sink(self, header: FrameHeader, carrier: Carrier, landed: Callable[[Waiting], None]) -> ChunkSink:
        """Where the payload goes: into memory, and then to `landed`; or nowhere."""
        memory = self._take(carrier, header)
        if memory is None:
            return RefusedChunk(header, carrier)
        return _Landing(self, Waiting(header, carrier, memory, self._now_s() + self._patience_s), landed)

    def keep(self, chunk: Waiting) -> None:
        """It is whole, and its transfer not open."""
        key = key_of(chunk.carrier, chunk.header.transfer)
        with self._lock:
            if key not in self._turned_away:
                self._waiting.setdefault(key, []).append(chunk)
                return
        self.drop([chunk])

    def opened(self, key: Key) -> None:
        """The transfer is open: its chunks are placed by the connections they came on."""
        with self._lock:
            chunks = self._waiting.pop(key, [])
        for chunk in chunks:
            chunk.carrier.place(chunk)

    def closed(self, carrier: Carrier) -> None:
        """Its connection is over: the sender asks what arrived, and sends the rest again."""
        with self._lock:
            gone: list[Waiting] = []
            for key, chunks in list(self._waiting.items()):
                gone += [chunk for chunk in chunks if chunk.carrier is carrier]
                self._keep_only(key, [chunk for chunk in chunks if chunk.carrier is not carrier])
        self.drop(gone)

    def turn_away(self, key: Key) -> None:
        """That transfer will not be opened: nothing is kept of it, and of its late chunks neither."""
        with self._lock:
            self._turned_away[key] = self._now_s() + self._patience_s
            if len(self._turned_away) > MAX_TURNED_AWAY:
                del self._turned_away[next(iter(self._turned_away))]
            chunks = self._waiting.pop(key, [])
        self.drop(chunks)

    def ended(self, transfer: bytes) -> None:
        """It is over, whoever sent for it."""
        with self._lock:
            keys = [key for key in self._waiting if key[2] == transfer]
        for key in keys:
            self.turn_away(key)

    def forget(self) -> None:
        """Let go what waited too long."""
        now_s = self._now_s()
        with self._lock:
            late = [chunk for chunks in self._waiting.values() for chunk in chunks if chunk.until_s <= now_s]
            for key, chunks in list(self._waiting.items()):
                self._keep_only(key, [chunk for chunk in chunks if chunk.until_s > now_s])
            self._turned_away = {key: until_s for key, until_s in self._turned_away.items() if until_s > now_s}
        self.drop(late)

    def drop(self, chunks: Iterable[Waiting]) -> None:
        """Give their memory back, and say that they were not kept."""
        for chunk in chunks:
            self.release(chunk.carrier, chunk.memory)
            refuse(chunk.header, chunk.carrier)

    def release(self, carrier: Carrier, memory: bytearray) -> None:
        """Memory of one chunk, once."""
        with self._lock:
            self._held[carrier.peer_name] -= len(memory)
            self._chunks[carrier.peer_name] -= 1
            if not self._chunks[carrier.peer_name]:
                del self._held[carrier.peer_name], self._chunks[carrier.peer_name]
        self._budget.release(carrier.peer_name, memory)

    def _keep_only(self, key: Key, chunks: list[Waiting]) -> None:
        if chunks:
            self._waiting[key] = chunks
        else:
            del self._waiting[key]

    def _take(self, carrier: Carrier, header: FrameHeader) -> bytearray | None:
        """Without waiting: a connection that waited here would hold up the OPEN that comes behind."""
        peer = carrier.peer_name
        with self._lock:
            limit = self._budget.current_share // SHARE
            if key_of(carrier, header.transfer) in self._turned_away:
                return None
            if self._held.get(peer, 0) + header.wire_bytes > limit or self._chunks[peer] >= MAX_CHUNKS:
                return None
            memory = self._budget.lease(peer, header.wire_bytes)
            if memory is None:
                return None
            self._held[peer] = self._held.get(peer, 0) + len(memory)
            self._chunks[peer] += 1
            return memory


class _Landing:
    """Fills memory. One thread."""

    def __init__(self, store: EarlyChunks, chunk: Waiting, landed: Callable[[Waiting], None]) -> None:
        self._store = store
        self._chunk = chunk
        self._landed = landed
        self._filled = 0

    @property
    def remaining(self) -> int:
        return self._chunk.header.wire_bytes - self._filled

    def fill(self, receive: Receive) -> int | None:
        place = memoryview(self._chunk.memory)[self._filled : self._chunk.header.wire_bytes]
        received = receive(place)
        if received:
            self._filled += received
            self._chunk.carrier.bytes_came()
        return received

    def complete(self) -> None:
        self._landed(self._chunk)

    def abandon(self) -> None:
        self._store.release(self._chunk.carrier, self._chunk.memory)


class RefusedChunk:
    """Reads an early chunk that cannot be kept, and says so."""

    def __init__(self, header: FrameHeader, carrier: Carrier) -> None:
        self.remaining = header.wire_bytes
        self._header = header
        self._carrier = carrier
        self._drain = memoryview(bytearray(min(_DRAIN_BYTES, header.wire_bytes)))

    def fill(self, receive: Receive) -> int | None:
        received = receive(self._drain[: self.remaining])
        if received:
            self.remaining -= received
            self._carrier.bytes_came()
        return received

    def complete(self) -> None:
        refuse(self._header, self._carrier)

    def abandon(self) -> None:
        """It was not wanted anyway."""


def refuse(header: FrameHeader, carrier: Carrier) -> None:
    """NACK: send it again once the transfer is accepted."""
    carrier.dropped(REFUSED)
    answer = FrameHeader(FrameType.NACK, header.transfer, header.piece, header.offset, attempt=header.attempt)
    carrier.send(answer, ReasonPayload(REFUSED))


def landing_or_refused(make: Callable[[], ChunkSink], header: FrameHeader, carrier: Carrier) -> ChunkSink:
    """The landing of an early chunk of an open transfer; a chunk of another cut than the one in force is refused."""
    try:
        return make()
    except ProtocolError as error:
        if error.reason != "bad_chunk":
            raise
        return RefusedChunk(header, carrier)
