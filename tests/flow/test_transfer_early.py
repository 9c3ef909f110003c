"""Chunks that leave before ACCEPT: they save a round trip, and weaken nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.core.ticket import Ticket
from farfill.testing.relay import Relay
from farfill.transfer.protocol import ExpectedTransfer, OutgoingTransfer
from support.transfer_harness import BytesSlot, Ends, config, make_pieces

NUM_TOKENS = 6000
DELAY_S = 0.15


def expect(ends: Ends, ticket: Ticket, held: frozenset[int] = frozenset()) -> tuple[BytesSlot, ExpectedTransfer]:
    slot = BytesSlot(ends.manifest(ticket.num_tokens), held)
    return slot, ends.receiver.expect(ticket, slot, timeout_s=5)


def send(ends: Ends, ticket: Ticket, address: str, **options: Any) -> OutgoingTransfer:
    manifest = ends.manifest(ticket.num_tokens)
    token = options.pop("token", None) or ends.sign(ticket)
    outgoing = ends.sender.begin(ticket, token, address, manifest, timeout_s=5)
    outgoing.offer(make_pieces(manifest))
    outgoing.finish()
    return outgoing


async def warm(ends: Ends, address: str) -> None:
    """One transfer, and every connection has its grant."""
    ticket = ends.ticket(600)
    _, expected = expect(ends, ticket)
    await asyncio.gather(expected.wait(), send(ends, ticket, address).wait())
    async with asyncio.timeout(5):
        while sum(ends.sender_seen.standing.values()) < 4:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0)


def check(slot: BytesSlot) -> None:
    assert [bytes(data) for _, data in make_pieces(slot.manifest)] == [bytes(memory) for memory in slot.memory]


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_chunks_leave_before_accept_can_come(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, delay_s=DELAY_S) as relay:
        await warm(ends, relay.address)
        ticket = ends.ticket(600)
        slot, expected = expect(ends, ticket)
        stats, result = await asyncio.gather(send(ends, ticket, relay.address).wait(), expected.wait())
    assert result.complete
    check(slot)
    assert stats.first_byte_s < 2 * DELAY_S
    assert stats.resent_chunks == 0


async def test_transfer_expected_late_finds_its_chunks_waiting(ends: Ends) -> None:
    await ends.start()
    await warm(ends, ends.receiver.address)
    ticket = ends.ticket(NUM_TOKENS)
    outgoing = send(ends, ticket, ends.receiver.address)
    await until(lambda: ends.receiver.early.held_bytes > 0)
    slot, expected = expect(ends, ticket)
    result, stats = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    check(slot)
    assert stats.resent_chunks == 0
    assert result.stats.raw_bytes == slot.manifest.total_bytes


async def test_transfer_larger_than_the_grant_waits_for_accept_with_the_rest(ends: Ends) -> None:
    ends.receiver = ends.make_receiver(config=config(receive_budget_mb=64))
    ends.sender = ends.make_sender(config=config(receive_budget_mb=64))
    await ends.start()
    await warm(ends, ends.receiver.address)
    tokens = 32_000  # 48 MiB, the grant is 16
    ticket = ends.ticket(tokens)
    outgoing = send(ends, ticket, ends.receiver.address)
    await until(lambda: ends.receiver.early.held_bytes > 0)
    slot, expected = expect(ends, ticket)
    result, _ = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    check(slot)


async def test_forged_ticket_gets_nothing_into_the_slot(ends: Ends) -> None:
    await ends.start()
    await warm(ends, ends.receiver.address)
    ticket = ends.ticket(NUM_TOKENS)
    slot, expected = expect(ends, ticket)
    outgoing = send(ends, ticket, ends.receiver.address, token=ends.sign(ticket)[:-4] + "AAAA")
    with pytest.raises(TransferError):
        await outgoing.wait()
    result = await expected.wait()
    assert result.failure is FallbackReason.TICKET_INVALID
    assert not any(map(any, slot.memory))
    await until(lambda: ends.receiver.early.held_bytes == 0)


async def test_transfer_nobody_expects_gives_its_memory_back(ends: Ends) -> None:
    receiver_config = config(timeout_ms=300)
    ends.receiver = ends.make_receiver(config=receiver_config)
    await ends.start()
    await warm(ends, ends.receiver.address)
    outgoing = send(ends, ends.ticket(NUM_TOKENS), ends.receiver.address)
    await until(lambda: ends.receiver.early.held_bytes > 0)
    with pytest.raises(TransferError, match="not_expected"):
        await outgoing.wait()
    await until(lambda: ends.receiver.early.held_bytes == 0)


async def test_transfer_that_failed_here_drops_what_waited(ends: Ends) -> None:
    await ends.start()
    await warm(ends, ends.receiver.address)
    ticket = ends.ticket(NUM_TOKENS)
    outgoing = send(ends, ticket, ends.receiver.address)
    await until(lambda: ends.receiver.early.held_bytes > 0)
    outgoing.fail(FallbackReason.PREFILL_FAILED, "broken")
    with pytest.raises(TransferError, match="broken"):
        await outgoing.wait()
    await until(lambda: ends.receiver.early.held_bytes == 0)
    slot, expected = expect(ends, ticket)
    assert (await expected.wait()).failure is FallbackReason.PREFILL_FAILED
    assert not any(map(any, slot.memory))


async def test_held_pieces_and_early_chunks_do_not_collide(ends: Ends) -> None:
    """The sender learns too late what is held: what it sent of it meanwhile is acknowledged and dropped."""
    await ends.start()
    await warm(ends, ends.receiver.address)
    ticket = ends.ticket(NUM_TOKENS)
    manifest = ends.manifest(NUM_TOKENS)
    held = frozenset(piece.index for piece in manifest.pieces[::2])
    slot = BytesSlot(manifest, held)
    for index, data in make_pieces(manifest):
        if index in held:
            slot.memory[index][:] = data
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    result, _ = await asyncio.gather(expected.wait(), send(ends, ticket, ends.receiver.address).wait())
    assert result.complete
    check(slot)


async def test_connections_lost_before_accept_cost_only_time(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, delay_s=0.02) as relay:
        await warm(ends, relay.address)
        ticket = ends.ticket(NUM_TOKENS)
        outgoing = send(ends, ticket, relay.address)
        await until(lambda: ends.receiver.early.held_bytes > 0)
        relay.cut()
        relay.heal()
        slot, expected = expect(ends, ticket)
        result, _ = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    check(slot)
