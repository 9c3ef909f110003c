"""The other way round: the receiver dials, for firewalls that let only the near side out. Same promises."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.testing.relay import Relay
from farfill.transport.memory import MemoryNetwork
from support.transfer_harness import (
    DECODE,
    HYBRID,
    PREFILL,
    BytesSlot,
    Ends,
    config,
    eventually,
    make_pieces,
)

MIB = 1024 * 1024
NUM_TOKENS = 6000


async def start(ends: Ends, **values: Any) -> None:
    """A sender that lets in, a receiver that dials."""
    ends.receiver = ends.make_receiver(listen=None, config=config(dial="receiver", **values))
    if not hasattr(ends, "sender"):
        ends.sender = ends.make_sender(listen="127.0.0.1:0", config=config(dial="receiver", **values))
    await ends.start()


class Moving:
    """A transfer under way."""

    def __init__(self, ends: Ends, num_tokens: int = 2000, *, source: str | None = None, timeout_s: float = 5) -> None:
        ticket = ends.ticket(num_tokens)
        self.slot = BytesSlot(ends.manifest(num_tokens))
        self.pieces = make_pieces(self.slot.manifest)
        self.outgoing = ends.sender.begin(ticket, ends.sign(ticket), "", self.slot.manifest, timeout_s=timeout_s)
        self.outgoing.offer(self.pieces)
        self.outgoing.finish()
        self.expected = ends.receiver.expect(
            ticket, self.slot, timeout_s=timeout_s, source=source or ends.sender.address
        )

    async def arrives(self) -> None:
        result, _ = await asyncio.gather(self.expected.wait(), self.outgoing.wait())
        assert result.complete
        assert [bytes(data) for _, data in self.pieces] == [bytes(memory) for memory in self.slot.memory]


@pytest.mark.parametrize("encryption", ["tls", "sealed"])
async def test_transfer_arrives_bit_equal(ends: Ends, encryption: str) -> None:
    ends.layout = HYBRID
    await start(ends, encryption=encryption)
    for _ in range(2):
        await Moving(ends).arrives()
    await asyncio.gather(*(Moving(ends, 300 + i).arrives() for i in range(10)))
    assert ends.receiver_seen.standing[PREFILL] == 4, "pooled, not one per transfer"
    assert ends.sender_seen.standing[DECODE] == 4
    assert ends.receiver.address == ""


async def test_transfer_arrives_in_memory(ends: Ends) -> None:
    network = MemoryNetwork()
    ends.receiver = ends.make_receiver(listen=None, transport=network.transport(ends.identity(DECODE, "decode")))
    ends.sender = ends.make_sender(listen="prefill", transport=network.transport(ends.identity(PREFILL, "prefill")))
    await ends.start()
    await Moving(ends).arrives()


async def test_lost_connection_is_dialled_again_and_only_what_is_missing_travels(ends: Ends) -> None:
    await start(ends)
    with Relay(ends.sender.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, NUM_TOKENS, source=relay.address)
        while relay.down.bytes < 2 * MIB:
            await asyncio.sleep(0.002)
        relay.reset_one()
        await moving.arrives()
        assert relay.connections_accepted > 4
        assert relay.down.bytes < 1.5 * moving.slot.manifest.total_bytes


async def test_link_cut_and_healed_within_the_deadline_completes(ends: Ends) -> None:
    await start(ends)
    with Relay(ends.sender.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, NUM_TOKENS, source=relay.address)
        while relay.down.bytes < 2 * MIB:
            await asyncio.sleep(0.002)
        relay.cut()
        await asyncio.sleep(1)
        relay.heal()
        await moving.arrives()


async def test_link_cut_for_good_ends_both_sides(ends: Ends) -> None:
    await start(ends)
    with Relay(ends.sender.address, rate_bytes_per_s=10 * MIB) as relay:
        moving = Moving(ends, NUM_TOKENS, source=relay.address, timeout_s=1)
        while relay.down.bytes < 2 * MIB:
            await asyncio.sleep(0.002)
        relay.cut()
        with pytest.raises(TransferError) as caught:
            await moving.outgoing.wait()
        result = await moving.expected.wait()
    assert caught.value.reason == FallbackReason.LINK_LOST
    assert (result.complete, result.failure) == (False, FallbackReason.LINK_LOST)


async def test_sender_that_nobody_dials_gives_up_at_the_deadline(ends: Ends) -> None:
    await start(ends)
    ticket = ends.ticket(600)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), "", ends.manifest(600), timeout_s=0.5)
    with pytest.raises(TransferError, match="not accepted"):
        await outgoing.wait()


async def test_wrong_worker_behind_the_address_ends_the_wait_at_once(ends: Ends) -> None:
    ends.sender = ends.make_sender(name="prefill-other", listen="127.0.0.1:0")
    await start(ends)
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    expected = ends.receiver.expect(ticket, slot, timeout_s=30, source=ends.sender.address)
    result = await asyncio.wait_for(expected.wait(), 10)
    assert not result.complete
    assert "is 'prefill-other', not 'prefill-far'" in result.detail


async def test_connection_of_a_stranger_is_not_given_anothers_transfer(ends: Ends) -> None:
    """A decode worker that dials gets only what is addressed to it by name."""
    await start(ends)
    stranger = ends.make_receiver(listen=None, name="decode-other", config=config(dial="receiver"))
    await stranger.start()
    try:
        ticket = ends.ticket(600)
        foreign = ends.ticket(600, decode="decode-other")
        stranger.expect(foreign, BytesSlot(ends.manifest(600)), timeout_s=1, source=ends.sender.address)
        outgoing = ends.sender.begin(ticket, ends.sign(ticket), "", ends.manifest(600), timeout_s=1)
        outgoing.offer(make_pieces(ends.manifest(600)))
        outgoing.finish()
        with pytest.raises(TransferError):
            await outgoing.wait()
        assert not ends.sender_seen.counts["sent:none"]
    finally:
        await stranger.close()


async def test_receiver_keeps_as_many_connections_as_the_sender_finds_the_path_needs(ends: Ends) -> None:
    await start(ends)
    await Moving(ends).arrives()
    standing = ends.sender_seen.standing
    for wanted in (11, 5):
        _found_out(ends, wanted)
        await asyncio.to_thread(eventually, lambda n=wanted: standing == {DECODE: n})
        await Moving(ends).arrives()


async def test_a_fixed_number_of_connections_stays(ends: Ends) -> None:
    await start(ends, connections=3)
    await Moving(ends).arrives()
    _found_out(ends, 9)
    await Moving(ends).arrives()
    assert ends.sender_seen.standing == {DECODE: 3}


def _found_out(ends: Ends, connections: int) -> None:
    """What `ConnectionTuner` finds out on a path with loss, which there is none of here."""
    (link,) = ends.sender._links.values()
    link._path._tuner.wanted = connections
    link._tune()
