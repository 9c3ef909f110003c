"""Transfers that work: over real TLS on loopback and in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TicketError, TransferError
from farfill.transport.memory import MemoryNetwork
from support.transfer_harness import (
    DECODE,
    HYBRID,
    LAYOUT,
    PREFILL,
    BytesSlot,
    Ends,
    config,
    make_pieces,
    transfer_threads,
)


async def move(ends: Ends, num_tokens: int = 2000, seed: int = 0) -> BytesSlot:
    """One whole transfer; returns the filled slot."""
    ticket = ends.ticket(num_tokens)
    slot = BytesSlot(ends.manifest(num_tokens))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    pieces = make_pieces(slot.manifest, seed)
    for piece in pieces:
        outgoing.offer([piece])
    outgoing.finish()
    result, stats = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    assert (result.prefix_tokens, result.failure) == (num_tokens, FallbackReason.NONE)
    assert [bytes(data) for _, data in pieces] == [bytes(memory) for memory in slot.memory]
    assert stats.raw_bytes == result.stats.raw_bytes == slot.manifest.total_bytes
    return slot


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "auto"])
@pytest.mark.parametrize("layout", [LAYOUT, HYBRID], ids=["full", "hybrid"])
async def test_transfer_over_tls_arrives_bit_equal(ends: Ends, compression: str, layout) -> None:
    ends.layout = layout
    ends.sender = ends.make_sender(config=config(compression=compression))
    await ends.start()
    await move(ends)
    await move(ends, num_tokens=1, seed=1)


@pytest.mark.parametrize(("there", "here"), [("sealed", "sealed"), ("sealed", "tls"), ("tls", "sealed")])
async def test_transfer_arrives_bit_equal_whichever_end_is_set_to_sealed(ends: Ends, there: str, here: str) -> None:
    ends.layout = HYBRID
    ends.receiver = ends.make_receiver(config=config(encryption=here))
    ends.sender = ends.make_sender(config=config(encryption=there))
    await ends.start()
    await move(ends, 4000)
    await move(ends, num_tokens=1, seed=1)


async def test_chunks_are_counted_by_kind_of_tensor(ends: Ends) -> None:
    ends.layout = HYBRID
    await ends.start()
    await move(ends)
    assert all(ends.sender_seen.counts[f"sent:{kind}"] for kind in ("full", "window", "recurrent", "conv"))


async def test_many_transfers_at_once_all_arrive(ends: Ends) -> None:
    await ends.start()
    await asyncio.gather(*(move(ends, 200 + 97 * i, seed=i) for i in range(12)))
    assert ends.receiver_seen.standing[PREFILL] == 4
    assert ends.sender_seen.standing[DECODE] == 4


async def test_open_before_expect_is_parked_and_served(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()
    async with asyncio.timeout(5):
        while key_count(ends) == 0:
            await asyncio.sleep(0.005)
    result = await ends.receiver.expect(ticket, slot, timeout_s=5).wait()
    await outgoing.wait()
    assert result.complete


async def test_held_pieces_are_not_sent(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(2000, continues=True)
    manifest = ends.manifest(2000)
    held = frozenset(piece.index for piece in manifest.by_prefill_chunk[0])
    slot = BytesSlot(manifest, held)
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, manifest, timeout_s=5)
    outgoing.offer(make_pieces(manifest))
    outgoing.finish()
    result, stats = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    assert stats.raw_bytes == manifest.total_bytes - sum(manifest.pieces[i].nbytes for i in held)
    assert all(not any(slot.memory[i]) for i in held), "what was held is not overwritten"


async def test_transfer_that_is_held_whole_needs_no_sender(ends: Ends) -> None:
    await ends.start()
    manifest = ends.manifest(600)
    slot = BytesSlot(manifest, frozenset(range(len(manifest.pieces))))
    ticket = ends.ticket(600)
    result = await ends.receiver.expect(ticket, slot, timeout_s=5).wait()
    assert (result.complete, result.stats.raw_bytes) == (True, 0)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, manifest, timeout_s=5)
    assert (await outgoing.wait()).raw_bytes == 0


async def test_keepalives_hold_a_slow_prefill_open(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    expected = ends.receiver.expect(ticket, slot, timeout_s=0.4)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=0.4)
    until_s = asyncio.get_running_loop().time() + 1.2
    while asyncio.get_running_loop().time() < until_s:
        outgoing.keepalive()
        await asyncio.sleep(0.02)
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()
    assert (await expected.wait()).complete
    assert (await outgoing.wait()).after_prefill_s < 0.4


async def test_transfer_in_memory_arrives_bit_equal(ends: Ends) -> None:
    network = MemoryNetwork()
    ends.receiver = ends.make_receiver(listen="decode", transport=network.transport(ends.identity(DECODE, "decode")))
    ends.sender = ends.make_sender(transport=network.transport(ends.identity(PREFILL, "prefill")))
    await ends.start()
    await move(ends)


def key_count(ends: Ends) -> int:
    return len(ends.receiver._parked)


def test_transfer_works_on_uvloop(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def run() -> None:
        ends = Ends(tmp_path)
        await ends.start()
        await move(ends)
        await ends.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
    assert transfer_threads() == []


async def test_wait_that_is_cancelled_does_not_end_the_transfer(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    for waiting in (expected.wait(), outgoing.wait()):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.01)
    assert ends.receiver.held_transfers() == 1
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()
    assert (await expected.wait()).complete
    await outgoing.wait()


async def test_fail_is_idempotent_and_harmless_after_the_end(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    for _ in range(2):
        expected.fail(FallbackReason.PREFILL_REFUSED, "no room")
    assert ends.receiver.held_transfers() == 0
    result = await expected.wait()
    assert (result.failure, result.detail, result.prefix_tokens) == (FallbackReason.PREFILL_REFUSED, "no room", 0)
    assert await expected.wait() == result
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    with pytest.raises(TransferError, match="no room"):
        await outgoing.wait()
    outgoing.fail(FallbackReason.PREFILL_FAILED, "late")
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()


async def test_wrong_bytes_from_the_engine_are_the_senders_failure(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    outgoing.offer([(0, memoryview(b"too short"))])
    result, error = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    assert isinstance(error, TransferError)
    assert "piece 0 has 9 bytes" in str(error)
    assert not isinstance(result, BaseException)
    assert result.failure is FallbackReason.PROTOCOL


async def test_incomplete_set_is_refused_by_the_sender(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    outgoing.offer(make_pieces(slot.manifest)[:-1])
    outgoing.finish()
    with pytest.raises(TransferError, match="1 pieces missing"):
        await outgoing.wait()
    assert not (await expected.wait()).complete


async def test_ticket_serves_one_outgoing_transfer_at_a_time(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(600)
    arguments = (ticket, ends.sign(ticket), ends.receiver.address, ends.manifest(600))
    outgoing = ends.sender.begin(*arguments, timeout_s=5)
    with pytest.raises(TicketError):
        ends.sender.begin(*arguments, timeout_s=5)
    outgoing.fail(FallbackReason.PREFILL_FAILED, "enough")
    with pytest.raises(TransferError, match="enough"):
        await outgoing.wait()


class BrokenObserver:
    """Every call fails."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise RuntimeError(f"{name} is broken")

        return fail


async def test_observer_that_always_fails_costs_no_connection(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.sender_seen = ends.receiver_seen = BrokenObserver()  # type: ignore[assignment]
    await ends.start()
    try:
        ticket = ends.ticket(2000)
        slot = BytesSlot(ends.manifest(2000))
        expected = ends.receiver.expect(ticket, slot, timeout_s=5)
        outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
        outgoing.offer(make_pieces(slot.manifest))
        outgoing.finish()
        stats = await outgoing.wait()
        assert (await expected.wait()).complete
        assert stats.resent_chunks == 0
    finally:
        await ends.close()
