"""Several sites that meet for the first time, all at once: every pair connects, every transfer arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from farfill.transfer.receiver import KVReceiver
from farfill.transfer.sender import KVSender
from support.transfer_harness import HYBRID, BytesSlot, Ends, config, make_pieces, transfer_threads

NUM_TOKENS = 700
EACH = 3


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    yield Ends(tmp_path, layout=HYBRID)
    assert transfer_threads() == []


@pytest.mark.parametrize(("senders", "receivers"), [(1, 2), (2, 1), (2, 2), (3, 2)])
async def test_first_burst_between_all_pairs_arrives(ends: Ends, senders: int, receivers: int) -> None:
    settings = config(connections=3)
    from_hosts = [ends.make_sender(name=f"prefill-{i}", config=settings) for i in range(senders)]
    to_hosts = [ends.make_receiver(name=f"decode-{i}", config=settings) for i in range(receivers)]
    await asyncio.gather(*(host.start() for host in (*from_hosts, *to_hosts)))
    try:
        pairs = [(s, r) for s in range(senders) for r in range(receivers)] * EACH
        await asyncio.gather(
            *(move(ends, from_hosts[s], to_hosts[r], f"{s}-{r}-{n}", s, r) for n, (s, r) in enumerate(pairs))
        )
        # One transport for everything: what a site keeps open does not grow with its transfers.
        assert max(ends.sender_seen.standing.values()) <= settings.connections
    finally:
        await asyncio.gather(*(host.close() for host in (*from_hosts, *to_hosts)))
    assert all(host.held_transfers() == 0 for host in to_hosts)
    assert all(host.active_transfers() == 0 for host in from_hosts)


async def move(ends: Ends, sender: KVSender, receiver: KVReceiver, name: str, s: int, r: int) -> None:
    ticket = ends.ticket(NUM_TOKENS, transfer_id=name, prefill=f"prefill-{s}", decode=f"decode-{r}")
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = receiver.expect(ticket, slot, timeout_s=10)
    outgoing = sender.begin(ticket, ends.sign(ticket), receiver.address, slot.manifest, timeout_s=10)
    pieces = make_pieces(slot.manifest, seed=hash(name))
    outgoing.offer(pieces)
    outgoing.finish()
    result, _ = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    assert [bytes(data) for _, data in pieces] == [bytes(memory) for memory in slot.memory]
