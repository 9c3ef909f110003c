"""What comes before its transfer is open takes a part of its sender's share, and no more places than there are."""

from __future__ import annotations

from farfill.transfer.budget import MIN_LEASE_BYTES, ReceiveBudget
from farfill.transfer.early import MAX_CHUNKS, SHARE, EarlyChunks, RefusedChunk, Waiting
from farfill.transport.protocol import ChunkSink
from farfill.wire.frames import FrameHeader, FrameType, Payload

MIB = 1024 * 1024


class Carrier:
    def __init__(self, peer: str) -> None:
        self.peer_name = peer
        self.peer_generation = "first"
        self.answers: list[FrameType] = []

    def send(self, header: FrameHeader, payload: Payload | None = None) -> None:
        self.answers.append(header.type)

    def bytes_came(self) -> None:
        pass

    def dropped(self, reason: str) -> None:
        pass

    def place(self, chunk: Waiting) -> None:
        raise AssertionError("no transfer is open here")


class Early:
    def __init__(self, budget_bytes: int) -> None:
        self.budget = ReceiveBudget(budget_bytes, MIB)
        self.now_s = 0.0
        self.store = EarlyChunks(self.budget, 10.0, lambda: self.now_s)

    def arrive(self, carrier: Carrier, nbytes: int, transfer: bytes = bytes(16)) -> bool:
        """Whether it is kept."""
        header = FrameHeader(FrameType.CHUNK, transfer, raw_bytes=nbytes, wire_bytes=nbytes)
        sink: ChunkSink = self.store.sink(header, carrier, self.store.keep)
        while sink.remaining:
            sink.fill(len)
        sink.complete()
        return not isinstance(sink, RefusedChunk)


def test_a_sender_gets_a_part_of_its_share_and_others_theirs() -> None:
    early = Early(64 * MIB)
    early.budget.share(2)
    greedy, modest = Carrier("greedy"), Carrier("modest")
    kept = sum(early.arrive(greedy, MIB) for _ in range(64))
    assert kept == 64 // 2 // SHARE
    assert greedy.answers == [FrameType.NACK] * (64 - kept)
    assert early.arrive(modest, MIB)
    early.now_s = 11.0
    early.store.forget()
    assert early.store.held_bytes == early.budget.leased_bytes == 0
    assert modest.answers == [FrameType.NACK]
    assert early.arrive(greedy, MIB)
    early.store.turn_away(("greedy", "first", bytes(16)))


def test_single_bytes_take_places_too() -> None:
    early = Early(4 * SHARE * MAX_CHUNKS * MIN_LEASE_BYTES)
    carrier = Carrier("trickling")
    kept = sum(early.arrive(carrier, 1) for _ in range(MAX_CHUNKS + 50))
    assert kept == MAX_CHUNKS
    early.store.ended(bytes(16))
    assert early.store.held_bytes == early.budget.leased_bytes == 0
    assert carrier.answers == [FrameType.NACK] * (MAX_CHUNKS + 50)
