"""Who may talk: the allowlist on either side, new certificates and CAs under way, and credit between senders."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.testing.relay import Relay
from farfill.transfer.budget import ReceiveBudget
from farfill.transport.tcp import TlsTcpTransport
from farfill.wire.frames import EarlyGrant
from support.pki import make_pki
from support.transfer_harness import DECODE, PREFILL, BytesSlot, Ends, config, make_pieces

MIB = 1024 * 1024
NUM_TOKENS = 6000
LOW_BITS = bytes(value & 15 for value in range(256))


async def move(ends: Ends, num_tokens: int = 2000, address: str | None = None, *, compressible: bool = False) -> None:
    ticket = ends.ticket(num_tokens)
    slot = BytesSlot(ends.manifest(num_tokens))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(
        ticket, ends.sign(ticket), address or ends.receiver.address, slot.manifest, timeout_s=5
    )
    pieces = make_pieces(slot.manifest)
    if compressible:
        pieces = [(index, memoryview(bytes(data).translate(LOW_BITS))) for index, data in pieces]
    outgoing.offer(pieces)
    outgoing.finish()
    results = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert [bytes(data) for _, data in pieces] == [bytes(memory) for memory in slot.memory]


@pytest.mark.parametrize("patterns", [["far/prefill/prefill-far"], ["far/*/*", "x/y/z"], ["*/prefill/*"]], ids=str)
async def test_allowed_peer_is_served(ends: Ends, patterns: list[str]) -> None:
    ends.receiver = ends.make_receiver(config=config(allowed_peers=patterns))
    ends.sender = ends.make_sender(config=config(allowed_peers=["near/decode/*"]))
    await ends.start()
    await move(ends)


@pytest.mark.parametrize("side", ["receiver", "sender"])
async def test_peer_that_is_not_allowed_is_refused_with_the_reason_on_both_sides(ends: Ends, side: str) -> None:
    strict = config(allowed_peers=["far/prefill/somebody-else"])
    ends.receiver = ends.make_receiver(config=strict if side == "receiver" else config())
    ends.sender = ends.make_sender(config=strict if side == "sender" else config())
    await ends.start()
    ticket = ends.ticket(600)
    slot = BytesSlot(ends.manifest(600))
    expected = ends.receiver.expect(ticket, slot, timeout_s=3)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=3)
    with pytest.raises(TransferError, match="peer_not_allowed"):
        await outgoing.wait()
    assert ends.sender_seen.counts["refused:peer_not_allowed"] > 0
    if side == "receiver":
        assert ends.receiver_seen.counts["refused:peer_not_allowed"] > 0
        assert "peer_not_allowed" in (await expected.wait()).detail
    else:
        expected.fail(FallbackReason.PREFILL_LOST, "the gateway tells")
    assert not any(map(any, slot.memory))


async def test_certificates_and_ca_change_without_dropping_a_running_transfer(ends: Ends, tmp_path: Path) -> None:
    """Old CA, both, new one only: connections that stand live on, new ones use what is in force."""
    old, new = ends.pki, make_pki(tmp_path / "new")
    both_cas = old.ca.read_bytes() + new.ca.read_bytes()
    sending = TlsTcpTransport(client=old.name(PREFILL, role="prefill", site="far").client())
    receiving = TlsTcpTransport(server=old.name(DECODE).server())
    ends.receiver = ends.make_receiver(transport=receiving)
    ends.sender = ends.make_sender(transport=sending)
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=8 * MIB) as relay:
        running = asyncio.create_task(move(ends, NUM_TOKENS, relay.address))
        while relay.up.bytes < MIB:
            await asyncio.sleep(0.005)
        for pki, cas in ((old, both_cas), (new, both_cas), (new, new.ca.read_bytes())):
            receiving.replace_contexts(server=pki.name(DECODE).server(ca_pem=cas))
            sending.replace_contexts(client=pki.name(PREFILL, role="prefill", site="far").client(ca_pem=cas))
            connections = relay.connections_accepted
            relay.reset_one()
            async with asyncio.timeout(5):
                while relay.connections_accepted == connections:
                    await asyncio.sleep(0.005)
        assert not running.done(), "the transfer was running all the time"
        await running
    await move(ends)
    sending.replace_contexts(client=old.name(PREFILL, role="prefill", site="far").client())
    alias = ends.receiver.address.replace("127.0.0.1", "localhost")  # another address: connections of its own
    with pytest.raises(TransferError, match="identity_refused"):
        await asyncio.wait_for(_send_only(ends, alias), 5)


async def _send_only(ends: Ends, address: str) -> None:
    ticket = ends.ticket(600)
    await ends.sender.begin(ticket, ends.sign(ticket), address, ends.manifest(600), timeout_s=3).wait()


async def test_sender_keeps_within_the_credit_of_the_receiver(ends: Ends) -> None:
    """A receiver behind a slow link acknowledges slowly: no more than the credit is ever on its way."""
    ends.sender = ends.make_sender(config=config(connections=8))
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=16 * MIB) as relay:
        await move(ends, 600, relay.address)  # the connections stand, and credit was told
        link = ends.sender._links[relay.address, DECODE]
        credit = MIB
        link.credit(credit, EarlyGrant())
        task = asyncio.create_task(move(ends, NUM_TOKENS, relay.address))
        most = 0
        while not task.done():
            most = max(most, link._allowance.unsettled_bytes)
            await asyncio.sleep(0.001)
        await task
    assert 0 < most <= credit


async def test_credit_below_one_chunk_lets_chunks_through_one_by_one(ends: Ends) -> None:
    await ends.start()
    await move(ends, 600)
    ends.sender._links[ends.receiver.address, DECODE].credit(1, EarlyGrant())
    await move(ends, NUM_TOKENS)


async def test_compressed_chunks_share_the_memory_of_the_budget(ends: Ends) -> None:
    ends.receiver = ends.make_receiver(config=config(receive_budget_mb=64))
    ends.sender = ends.make_sender(config=config(compression="zstd", connections=8, receive_budget_mb=64))
    await ends.start()
    await asyncio.gather(*(move(ends, 1500, compressible=True) for _ in range(6)))
    assert ends.receiver_seen.counts["received:zstd"] > 0


async def test_compressed_chunks_get_through_when_there_is_memory_for_one_only(ends: Ends) -> None:
    """Connections that wait for memory share threads with the one that has it: none may hold up another."""
    ends.receiver = ends.make_receiver(config=config())
    ends.sender = ends.make_sender(config=config(compression="lz4", connections=8))
    ends.receiver.budget = ReceiveBudget(1, 1)
    await ends.start()
    with Relay(ends.receiver.address, rate_bytes_per_s=32 * MIB) as relay:  # chunks come in parts
        await asyncio.wait_for(
            asyncio.gather(*(move(ends, 1500, relay.address, compressible=True) for _ in range(3))), 30
        )
    assert ends.receiver_seen.counts["received:lz4"] > 0
    assert ends.receiver.budget.leased_bytes == 0


async def test_hundred_transfers_at_once_share_the_link_and_do_not_wait_for_a_large_one(ends: Ends) -> None:
    await ends.start()
    loop = asyncio.get_running_loop()
    sizes = [20_000, *[300] * 100]
    data = {size: make_pieces(ends.manifest(size)) for size in set(sizes)}
    with Relay(ends.receiver.address, rate_bytes_per_s=16 * MIB) as relay:
        await move(ends, 100, relay.address)
        moving = []
        for size in sizes:
            ticket, slot = ends.ticket(size), BytesSlot(ends.manifest(size))
            expected = ends.receiver.expect(ticket, slot, timeout_s=10)
            outgoing = ends.sender.begin(ticket, ends.sign(ticket), relay.address, slot.manifest, timeout_s=10)
            moving.append((size, slot, expected, outgoing))
        started_s = loop.time()
        for size, _, _, outgoing in moving:
            outgoing.offer(data[size])
            outgoing.finish()

        async def ended_s(number: int) -> float:
            size, slot, expected, outgoing = moving[number]
            result, _ = await asyncio.gather(expected.wait(), outgoing.wait())
            assert result.complete
            assert [bytes(piece) for _, piece in data[size]] == [bytes(memory) for memory in slot.memory]
            return loop.time() - started_s

        large_s, *equal_s = await asyncio.gather(*(ended_s(number) for number in range(len(moving))))
    equal_s.sort()
    # Equal shares: each has a hundredth of the line until all of the equal ones are through.
    assert equal_s[-1] <= 2 * equal_s[50]
    assert large_s > equal_s[50]
