"""Transfers over a link that misbehaves: cut, blackhole, reset, slow. Right bytes or a typed failure, nothing held."""

from __future__ import annotations

import asyncio
import time

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.testing.relay import Relay
from farfill.transfer.protocol import ReceiveResult
from support.transfer_harness import BytesSlot, Ends, config, make_pieces

NUM_TOKENS = 6000
MIB = 1024 * 1024


class Moving:
    """A transfer under way."""

    def __init__(self, ends: Ends, address: str, *, timeout_s: float = 5, finish: bool = True) -> None:
        self.ticket = ends.ticket(NUM_TOKENS)
        self.slot = BytesSlot(ends.manifest(NUM_TOKENS))
        self.pieces = make_pieces(self.slot.manifest)
        self.expected = ends.receiver.expect(self.ticket, self.slot, timeout_s=timeout_s)
        self.outgoing = ends.sender.begin(
            self.ticket, ends.sign(self.ticket), address, self.slot.manifest, timeout_s=timeout_s
        )
        self.outgoing.offer(self.pieces)
        if finish:
            self.outgoing.finish()

    async def both(self) -> tuple[ReceiveResult, BaseException | None]:
        results = await asyncio.gather(self.expected.wait(), self.outgoing.wait(), return_exceptions=True)
        assert isinstance(results[0], ReceiveResult)
        return results[0], results[1] if isinstance(results[1], BaseException) else None

    def check_prefix(self, result: ReceiveResult) -> None:
        """Every piece of the usable prefix is bit-equal."""
        step = self.slot.manifest.layout.prefill_chunk_tokens
        chunks = -(-result.prefix_tokens // step)
        for group in self.slot.manifest.by_prefill_chunk[:chunks]:
            for piece in group:
                assert bytes(self.slot.memory[piece.index]) == bytes(self.pieces[piece.index][1])


async def until_bytes(relay: Relay, count: int) -> None:
    async with asyncio.timeout(10):
        while relay.up.bytes < count:
            await asyncio.sleep(0.002)


async def test_link_with_rate_and_delay_delivers_bit_equal(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=20 * MIB, delay_s=0.02) as relay:
        moving = Moving(ends, relay.address)
        result, error = await moving.both()
    assert error is None
    assert result.complete
    moving.check_prefix(result)
    assert 0.2 < result.stats.total_s < 3
    assert ends.sender_seen.counts["link"] > 0


async def test_connection_reset_in_the_middle_resends_only_what_it_carried(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, relay.address)
        await until_bytes(relay, 2 * MIB)
        relay.reset_one()
        await until_bytes(relay, 3 * MIB)
        relay.reset_one()
        result, error = await moving.both()
    assert error is None
    assert result.complete
    moving.check_prefix(result)
    assert ends.sender_seen.counts["resent:connection_lost"] >= 1
    assert relay.up.bytes < 1.5 * moving.slot.manifest.total_bytes


async def test_link_cut_and_healed_within_grace_completes(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, relay.address)
        await until_bytes(relay, 2 * MIB)
        relay.cut()
        await asyncio.sleep(0.2)
        relay.heal()
        result, error = await moving.both()
    assert error is None
    assert result.complete
    moving.check_prefix(result)


async def test_link_cut_shorter_than_the_deadline_resends_only_what_was_on_its_way(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, relay.address, timeout_s=4)
        await until_bytes(relay, 3 * MIB)
        chunks = sum(ends.receiver_seen.counts[f"received:{codec}"] for codec in ("none", "lz4", "zstd"))
        assert chunks > 0
        relay.cut()
        await asyncio.sleep(2)
        sent_before = ends.sender_seen.counts["sent:none"]
        in_flight = sent_before - ends.receiver_seen.counts["received:none"]
        relay.heal()
        healed_s = time.monotonic()
        result, error = await moving.both()
    assert error is None
    assert result.complete
    moving.check_prefix(result)
    rest_s = (moving.slot.manifest.total_bytes - 3 * MIB) / (10 * MIB)
    assert time.monotonic() - healed_s < rest_s + 1.5
    assert ends.sender_seen.counts["resent:connection_lost"] <= in_flight


async def test_chunk_stuck_on_a_slow_connection_goes_out_on_another(ends: Ends) -> None:
    """One of the connections stops reading; nothing is reset, yet the transfer does not wait for it."""
    ends.sender = ends.make_sender(config=config(timeout_ms=20_000, connections=4))
    ends.receiver = ends.make_receiver(config=config(timeout_ms=20_000))
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=8 * MIB) as relay:
        moving = Moving(ends, relay.address, timeout_s=20)
        await until_bytes(relay, 2 * MIB)
        relay.freeze_one()
        started_s = time.monotonic()
        result, error = await moving.both()
    assert error is None
    assert result.complete
    moving.check_prefix(result)
    assert ends.sender_seen.counts["resent:overdue"] >= 1
    assert time.monotonic() - started_s < 8, "dead connections are found after 15 s only"


async def test_link_cut_for_good_ends_both_sides_with_link_lost(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, relay.address, timeout_s=1.5)
        await until_bytes(relay, 5 * MIB)
        cut_s = time.monotonic()
        relay.cut()
        result, error = await moving.both()
    assert (result.complete, result.failure) == (False, FallbackReason.LINK_LOST)
    assert 0 < result.prefix_tokens < NUM_TOKENS
    assert result.prefix_tokens % 512 == 0
    moving.check_prefix(result)
    assert isinstance(error, TransferError)
    assert error.reason == FallbackReason.LINK_LOST
    assert time.monotonic() - cut_s < 2.5


async def test_blackhole_ends_the_receiver_by_timeout(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, relay.address, timeout_s=0.5)
        await until_bytes(relay, 2 * MIB)
        relay.blackhole()
        result, error = await moving.both()
    assert (result.complete, result.failure) == (False, FallbackReason.TRANSFER_TIMEOUT)
    moving.check_prefix(result)
    assert isinstance(error, TransferError)
    assert error.reason in (FallbackReason.LINK_LOST, FallbackReason.TRANSFER_TIMEOUT)


async def test_blackhole_that_heals_in_time_completes(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, relay.address)
        await until_bytes(relay, 2 * MIB)
        relay.blackhole()
        await asyncio.sleep(0.4)
        relay.heal()
        result, error = await moving.both()
    assert error is None
    assert result.complete
    moving.check_prefix(result)


async def test_slow_link_is_not_silence(ends: Ends) -> None:
    """One chunk takes far longer than the timeout: its bytes count as signs of life."""
    ends.sender = ends.make_sender(config=config(connections=1))
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=MIB) as relay:
        moving = Moving(ends, relay.address, timeout_s=0.6)
        result, error = await moving.both()
    assert error is None
    assert result.complete


async def test_unreachable_receiver_fails_the_sender_soon(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    started_s = time.monotonic()
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), "127.0.0.1:9", ends.manifest(NUM_TOKENS), timeout_s=5)
    with pytest.raises(TransferError) as caught:
        await outgoing.wait()
    assert caught.value.reason == FallbackReason.LINK_LOST
    assert time.monotonic() - started_s < 3


async def test_sender_killed_in_the_middle_leaves_the_prefix(ends: Ends) -> None:
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, relay.address, timeout_s=1, finish=False)
        await until_bytes(relay, 5 * MIB)
        for link in ends.sender._links.values():
            link.abort()
        result = await moving.expected.wait()
        await ends.sender.close()
    assert (result.complete, result.failure) == (False, FallbackReason.LINK_LOST)
    assert 0 < result.prefix_tokens < NUM_TOKENS
    moving.check_prefix(result)


async def test_sender_that_closes_tells_why(ends: Ends) -> None:
    await ends.start()
    moving = Moving(ends, ends.receiver.address, finish=False)
    async with asyncio.timeout(5):
        while not ends.receiver_seen.counts:
            await asyncio.sleep(0.002)
    await ends.sender.close()
    result, error = await moving.both()
    assert result.failure == FallbackReason.PREFILL_LOST
    assert isinstance(error, TransferError)


async def test_receiver_restarted_fails_its_transfers(ends: Ends) -> None:
    await ends.start()
    moving = Moving(ends, ends.receiver.address, finish=False)
    async with asyncio.timeout(5):
        while not ends.receiver_seen.counts:
            await asyncio.sleep(0.002)
    address = ends.receiver.address
    await ends.receiver.close()
    ends.receiver = ends.make_receiver(listen=address)
    await ends.receiver.start()
    result, error = await moving.both()
    assert result.failure == FallbackReason.LINK_LOST
    assert isinstance(error, TransferError)
    assert error.reason == FallbackReason.LINK_LOST


async def test_link_that_trickles_is_given_up_by_the_rate_it_had(ends: Ends) -> None:
    """Bytes keep coming, so no silence ends it: a chunk that takes so much longer than others before does."""
    ends.sender = ends.make_sender(config=config(connections=2))
    ends.receiver = ends.make_receiver(config=config(connections=2))
    await ends.start()
    with Relay(ends.receiver.address) as relay:
        first = Moving(ends, relay.address)
        result, error = await first.both()
        assert error is None
        assert result.complete
        relay.set_rate(128 * 1024)  # the relay passes 64 KiB at a time: no silence
        moving = Moving(ends, relay.address, timeout_s=2)
        result, error = await moving.both()
    assert error is not None
    assert not result.complete
    assert result.failure is FallbackReason.TRANSFER_TIMEOUT
    # A PING may wait behind the trickle for so long that the sender gives its connections up, and then the transfer.
    assert "did not come whole" in result.detail or "not confirmed" in result.detail
    moving.check_prefix(result)


async def test_prefill_that_is_slow_says_nothing_of_the_link(ends: Ends) -> None:
    """Pieces come one after the other, each when the one before has arrived: a round trip for each."""
    await ends.start()
    with Relay(ends.receiver.address, delay_s=0.06) as relay:
        await Moving(ends, relay.address, timeout_s=30).both()
        (link,) = ends.sender._links.values()
        before, _ = link.measured()
        assert before is not None
        ticket = ends.ticket(NUM_TOKENS)
        slot = BytesSlot(ends.manifest(NUM_TOKENS))
        expected = ends.receiver.expect(ticket, slot, timeout_s=30)
        outgoing = ends.sender.begin(ticket, ends.sign(ticket), relay.address, slot.manifest, timeout_s=30)
        pieces, confirmed = make_pieces(slot.manifest), ends.receiver_seen.counts
        for group in range(0, len(pieces), 4):
            chunks = confirmed["received:none"]
            outgoing.offer(pieces[group : group + 4])
            async with asyncio.timeout(10):
                while confirmed["received:none"] < chunks + len(pieces[group : group + 4]):
                    await asyncio.sleep(0.002)
        outgoing.finish()
        assert (await expected.wait()).complete
        await outgoing.wait()
        after, _ = link.measured()
        assert after is not None
        assert after > 0.6 * before
