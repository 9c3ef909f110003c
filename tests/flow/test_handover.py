"""Two senders, one reservation, over real TLS: the second brings what the first did not, and the first is fenced."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.core.ticket import Ticket
from farfill.testing.relay import Relay
from farfill.transfer.handover import Handover, HandoverRefusedError
from farfill.transfer.handover_machine import HandoverState, NextSender
from farfill.transfer.sender import KVSender
from farfill.wire.frames import FLAG_CHECKSUM, FrameHeader, FrameType, layout_payload, transfer_key
from farfill.wire.frames import OpenPayload as Open
from support.raw_peer import RawPeer
from support.transfer_harness import (
    FINGERPRINT,
    HYBRID,
    PREFILL,
    BytesSlot,
    Ends,
    config,
    make_pieces,
    transfer_threads,
)

MIB = 1024 * 1024
TOKENS = 6000
SECOND = "prefill-other"
LOST = FallbackReason.PREFILL_LOST


class Two:
    """A receiver and two senders at different sites, which computed the same bytes."""

    def __init__(self, ends: Ends, second: KVSender) -> None:
        self.ends = ends
        self.second = second
        self.slot = BytesSlot(ends.manifest(TOKENS))
        self.pieces = make_pieces(self.slot.manifest)

    def expect(self, ticket: Ticket, **options: Any) -> Handover:
        fields = {"timeout_s": 2.0, "hold_s": 10.0, **options}
        return Handover(self.ends.receiver, ticket, self.slot, **fields)

    def push(self, ticket: Ticket, *, through: str | None = None, count: int | None = None) -> asyncio.Future[Any]:
        """Send as `ticket` allows; of the pieces the first `count` only, without an end."""
        sender = self.ends.sender if ticket.prefill == PREFILL else self.second
        address = through or self.ends.receiver.address
        outgoing = sender.begin(ticket, self.ends.sign(ticket), address, self.slot.manifest, timeout_s=5)
        outgoing.offer(self.pieces[:count])
        if count is None:
            outgoing.finish()
        return asyncio.ensure_future(outgoing.wait())

    def check(self) -> None:
        assert [bytes(data) for _, data in self.pieces] == [bytes(memory) for memory in self.slot.memory]


@pytest.fixture
async def two(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    ends = Ends(tmp_path, **getattr(request, "param", {}))
    ends.receiver = ends.make_receiver(config=config(chunk_size_mb=1))
    ends.sender = ends.make_sender(config=config(connections=4))
    second = ends.make_sender(name=SECOND, config=config(connections=2))
    await ends.start()
    await second.start()
    yield Two(ends, second)
    await second.close()
    await ends.close()
    assert ends.receiver.held_transfers() == 0
    assert transfer_threads() == []


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.002)


async def failed(sending: asyncio.Future[Any]) -> str:
    with pytest.raises(TransferError) as error:
        await sending
    return error.value.reason


@pytest.mark.parametrize("two", [{}, {"layout": HYBRID}], indirect=True, ids=["full", "hybrid"])
async def test_second_sender_brings_only_what_the_first_did_not(two: Two) -> None:
    ends, total = two.ends, two.slot.manifest.total_bytes
    first, second = ends.ticket(TOKENS), ends.ticket(TOKENS, prefill=SECOND, continues=True)
    handover = two.expect(first)
    with Relay(ends.receiver.address, rate_bytes_per_s=8 * MIB) as relay:
        sending = two.push(first, through=relay.address)
        await until(lambda: relay.up.bytes > total // 3)
        relay.cut()
        held = await handover.proceed(first.transfer_id, NextSender(second), LOST, "killed")
        assert total / 8 < held < total
        stats = await two.push(second)
        result = await handover.wait()
        assert await failed(sending) == "link_lost"
    assert result.last.complete
    assert [one.failure for one in result.earlier] == [LOST]
    assert result.reused_bytes == held
    assert stats.raw_bytes == result.last.stats.raw_bytes == total - held
    two.check()


async def test_sender_that_decode_lost_is_followed_by_the_next(two: Two) -> None:
    first, second = two.ends.ticket(TOKENS), two.ends.ticket(TOKENS, prefill=SECOND, continues=True)
    handover = two.expect(first, timeout_s=0.5)
    sending = two.push(first, count=3)  # then silence
    status = await handover.status(first.transfer_id, 10.0)
    assert (status.state, status.reason) == (HandoverState.ORPHANED, "transfer_timeout")
    assert await failed(sending) == "transfer_timeout"
    held = await handover.proceed(first.transfer_id, NextSender(second), status.reason, status.detail)
    assert held == sum(piece.nbytes for piece in two.slot.manifest.pieces[:3])
    await two.push(second)
    assert (await handover.wait()).last.complete
    two.check()


async def test_second_sender_may_come_before_it_is_named(two: Two) -> None:
    first, second = two.ends.ticket(TOKENS), two.ends.ticket(TOKENS, prefill=SECOND, continues=True)
    handover = two.expect(first)
    early = two.push(second)
    sending = two.push(first, count=2)
    await until(lambda: two.ends.receiver_seen.counts["received:none"] >= 2)
    await handover.proceed(first.transfer_id, NextSender(second), LOST, "killed")
    await early
    assert (await handover.wait()).last.complete
    assert await failed(sending) == "prefill_lost"
    two.check()


async def test_late_bytes_of_the_fenced_sender_never_land(two: Two) -> None:
    """The first sender was in the middle of a chunk, and goes on with other bytes after the second has taken over."""
    ends, manifest = two.ends, two.slot.manifest
    first, second = ends.ticket(TOKENS), ends.ticket(TOKENS, prefill=SECOND, continues=True)
    handover = two.expect(first)
    piece = manifest.pieces[0]
    garbage = random.Random(1).randbytes(piece.nbytes)
    client = ends.pki.name(PREFILL, role="prefill", site="far").client()

    def hostile(address: str) -> tuple[RawPeer, bytes]:
        peer = RawPeer(address, client)
        peer.hello(PREFILL, FINGERPRINT)
        peer.receive_type(FrameType.WELCOME)
        layout, key = manifest.layout, transfer_key(first.transfer_id)
        payload = Open(
            ends.sign(first),
            manifest.digest,
            TOKENS,
            layout.version,
            layout.prefill_chunk_tokens,
            piece.nbytes,
            layout_payload(layout),
        )
        peer.send(FrameHeader(FrameType.OPEN, key), payload)
        peer.receive_type(FrameType.ACCEPT)
        header = FrameHeader(FrameType.CHUNK, key, 0, 0, piece.nbytes, piece.nbytes, 0, FLAG_CHECKSUM, b"c" * 16)
        peer.send_bytes(header.pack() + garbage[:1000])
        return peer, garbage[1000:] + header.pack() + garbage

    peer, rest = await asyncio.to_thread(hostile, ends.receiver.address)
    await until(lambda: bytes(two.slot.memory[0][:1000]) == garbage[:1000])
    await handover.proceed(first.transfer_id, NextSender(second), LOST, "killed")
    sending = two.push(second)
    await asyncio.to_thread(peer.send_bytes, rest)
    await until(lambda: ends.receiver_seen.counts["dropped:fenced"] == 2)
    await sending
    result = await handover.wait()
    assert result.last.complete
    assert result.reused_bytes == 0, "half a piece is thrown away"
    two.check()
    await asyncio.to_thread(peer.__exit__, None, None, None)


async def test_first_sender_back_again_with_its_old_ticket_is_refused(two: Two) -> None:
    first, second = two.ends.ticket(TOKENS), two.ends.ticket(TOKENS, prefill=SECOND, continues=True)
    handover = two.expect(first)
    sending = two.push(first, count=2)
    await until(lambda: two.ends.receiver_seen.counts["received:none"] >= 2)
    await handover.proceed(first.transfer_id, NextSender(second), LOST, "killed")
    assert await failed(sending) == "prefill_lost"
    assert await failed(two.push(first)) in ("prefill_lost", "ticket_invalid")
    await two.push(second)
    assert (await handover.wait()).last.complete
    two.check()


async def test_three_senders_one_after_the_other(two: Two) -> None:
    ends, total = two.ends, two.slot.manifest.total_bytes
    second = ends.ticket(TOKENS, prefill=SECOND, continues=True)
    tickets = [ends.ticket(TOKENS), second, ends.ticket(TOKENS, continues=True)]
    handover = two.expect(tickets[0])
    brought = []
    for i, ticket in enumerate(tickets[:2]):
        before = ends.receiver_seen.counts["received:none"]
        sending = two.push(ticket, count=2 + 2 * i)
        await until(lambda before=before: ends.receiver_seen.counts["received:none"] >= before + 2)
        brought.append(
            await handover.proceed(ticket.transfer_id, NextSender(tickets[i + 1]), LOST, f"sender {i} was killed")
        )
        assert await failed(sending) == "prefill_lost"
    stats = await two.push(tickets[2])
    result = await handover.wait()
    assert len(result.earlier) == 2
    assert 0 < brought[0] < brought[1] == result.reused_bytes == total - stats.raw_bytes
    two.check()


async def test_nobody_left_gives_the_prefix_all_senders_brought(two: Two) -> None:
    ends = two.ends
    first, second = ends.ticket(TOKENS), ends.ticket(TOKENS, prefill=SECOND, continues=True)
    handover = two.expect(first)
    pieces_per_chunk = len(ends.layout.tensors)
    two.push(first, count=pieces_per_chunk).add_done_callback(lambda done: done.exception())
    await until(lambda: ends.receiver_seen.counts["received:none"] >= pieces_per_chunk)
    await handover.proceed(first.transfer_id, NextSender(second), LOST, "killed")
    two.push(second, count=2 * pieces_per_chunk).add_done_callback(lambda done: done.exception())
    await until(lambda: ends.receiver_seen.counts["received:none"] >= 2 * pieces_per_chunk)
    handover.fail(LOST, "killed as well")
    result = await handover.wait()
    assert not result.last.complete
    assert result.last.prefix_tokens == 2 * ends.layout.prefill_chunk_tokens
    assert result.last.failure is LOST


async def test_handover_to_a_ticket_for_somebody_else_is_refused_and_changes_nothing(two: Two) -> None:
    ends = two.ends
    first = ends.ticket(TOKENS)
    handover = two.expect(first)
    sending = two.push(first, count=1)
    await until(lambda: ends.receiver_seen.counts["received:none"] >= 1)
    for wrong in (
        ends.ticket(TOKENS, tenant="another"),
        ends.ticket(TOKENS - 1),
        ends.ticket(TOKENS, decode="x"),
        first,
    ):
        with pytest.raises(HandoverRefusedError):
            await handover.proceed(first.transfer_id, NextSender(wrong), LOST, "")
    assert not sending.done()
    assert (await handover.status(first.transfer_id, 0.0)).state is HandoverState.RECEIVING
    handover.fail(LOST, "over")
    await handover.wait()
    await failed(sending)
