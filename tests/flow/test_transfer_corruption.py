"""Bits that flip between the sender's tensor and the receiver's: found, asked for again, and in the end given up."""

from __future__ import annotations

import asyncio
from threading import Lock

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.transfer.protocol import ReceiveResult
from farfill.transport.memory import MemoryNetwork, MemoryTransport
from farfill.transport.protocol import Channel, Listener
from farfill.transport.waker import Waker
from support.transfer_harness import (
    DECODE,
    PREFILL,
    BytesSlot,
    Ends,
    config,
    make_pieces,
)

NUM_TOKENS = 2000
BIG_BYTES = 4096


class FlippingTransport:
    """A memory transport that flips one bit in each of the next `flips` big writes."""

    def __init__(self, inner: MemoryTransport, flips: int) -> None:
        self._inner = inner
        self._lock = Lock()
        self.flips = flips

    def listen(self, address: str) -> Listener:
        return self._inner.listen(address)

    def dial(self, address: str, *, timeout_s: float, interrupt: Waker, connect_s: float | None = None) -> Channel:
        return FlippingChannel(self, self._inner.dial(address, timeout_s=timeout_s, interrupt=interrupt))

    def take_flip(self) -> bool:
        with self._lock:
            self.flips -= 1
            return self.flips >= 0


class FlippingChannel:
    def __init__(self, transport: FlippingTransport, inner: Channel) -> None:
        self._transport = transport
        self._inner = inner
        self.peer = inner.peer
        self.fileno = inner.fileno
        self.recv_into = inner.recv_into
        self.flush = inner.flush
        self.path = inner.path
        self.finish_sending = inner.finish_sending
        self.close = inner.close
        self.hold_unsent = inner.hold_unsent
        self.await_bytes = inner.await_bytes
        self.wants_write = False

    def send(self, data: memoryview) -> int:
        if len(data) < BIG_BYTES or not self._transport.take_flip():
            return self._inner.send(data)
        damaged = bytearray(data)
        damaged[0] ^= 1
        return self._inner.send(memoryview(damaged))


async def run(ends: Ends, flips: int, **settings: object) -> tuple[ReceiveResult, object, bool]:
    network = MemoryNetwork()
    settings = {"connections": 1, **settings}
    ends.receiver = ends.make_receiver(
        listen="decode", transport=network.transport(ends.identity(DECODE, "decode")), config=config(**settings)
    )
    transport = FlippingTransport(network.transport(ends.identity(PREFILL, "prefill")), flips)
    ends.sender = ends.make_sender(transport=transport, config=config(**settings))
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    pieces = make_pieces(slot.manifest)
    outgoing.offer(pieces)
    outgoing.finish()
    result, sent = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    assert isinstance(result, ReceiveResult)
    return result, sent, [bytes(data) for _, data in pieces] == [bytes(memory) for memory in slot.memory]


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
async def test_flipped_bits_are_found_and_resent(ends: Ends, compression: str) -> None:
    result, sent, equal = await run(ends, flips=3, compression=compression)
    assert not isinstance(sent, BaseException)
    assert result.complete
    assert equal
    assert result.stats.resent_chunks >= 1
    assert len(sent.retries) == sent.resent_chunks
    assert {retry.reason for retry in sent.retries} == {"checksum"}
    assert ends.sender_seen.counts["resent:checksum"] == ends.receiver_seen.counts["resent:checksum"] >= 1


async def test_chunk_that_is_always_wrong_fails_both_sides(ends: Ends) -> None:
    result, sent, _ = await run(ends, flips=1_000_000, retry=2)
    assert (result.complete, result.failure, result.prefix_tokens) == (False, FallbackReason.CHECKSUM, 0)
    assert isinstance(sent, TransferError)
    assert sent.reason == FallbackReason.CHECKSUM
    assert "failed 3 times" in str(sent)


async def test_checksum_switched_off_is_not_computed(ends: Ends) -> None:
    result, sent, equal = await run(ends, flips=1, checksum=False)
    assert not isinstance(sent, BaseException)
    assert result.complete
    assert not equal, "nothing else would notice a flipped bit: that is what the setting means"
