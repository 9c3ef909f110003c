"""Chunks that must not land: late, twice, foreign, cut, corrupt or out of place. Both sides hear why."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import pytest
import xxhash

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.core.ticket import Ticket
from farfill.kv.manifest import build_manifest
from farfill.transfer.protocol import ReceiveResult
from farfill.wire.frames import (
    FLAG_CHECKSUM,
    FrameHeader,
    FrameType,
    OpenPayload,
    layout_payload,
    pack_header,
    transfer_key,
)
from support.raw_peer import RawPeer
from support.transfer_harness import (
    FINGERPRINT,
    LAYOUT,
    PREFILL,
    BytesSlot,
    Ends,
    eventually,
    make_pieces,
    prefill_context,
)

NUM_TOKENS = 600


class Opened:
    """A raw peer with an open transfer that expects whole pieces of LAYOUT."""

    def __init__(self, ends: Ends, peer: RawPeer, ticket: Ticket, *, generation: str = "g1") -> None:
        self.peer = peer
        self.key = transfer_key(ticket.transfer_id)
        self.manifest = build_manifest(LAYOUT, ticket.num_tokens)
        peer.hello(PREFILL, FINGERPRINT, generation=generation)
        peer.receive_type(FrameType.WELCOME)
        payload = OpenPayload(
            ends.sign(ticket), self.manifest.digest, ticket.num_tokens, 1, 512, 1 << 20, layout_payload(LAYOUT)
        )
        peer.send(FrameHeader(FrameType.OPEN, self.key), payload)

    def chunk(self, at: int, data: bytes, **changes: Any) -> None:
        header = FrameHeader(
            FrameType.CHUNK,
            self.key,
            at,
            0,
            len(data),
            len(data),
            0,
            FLAG_CHECKSUM,
            xxhash.xxh3_128_digest(data),
        )
        self.peer.send_bytes(pack_header(replace(header, **changes)) + data)


async def test_late_and_duplicate_chunks_never_reach_a_fenced_slot(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            opened = Opened(ends, peer, ticket)
            peer.receive_type(FrameType.ACCEPT)
            first = b"\x01" * opened.manifest.pieces[0].nbytes
            opened.chunk(0, first)
            peer.receive_type(FrameType.ACK)
            opened.chunk(0, b"\x02" * len(first))
            peer.receive_type(FrameType.ACK)
            assert bytes(slot.memory[0]) == first, "a duplicate does not overwrite"
            # Half a chunk is on its way when the transfer ends.
            second = b"\x03" * opened.manifest.pieces[1].nbytes
            header = pack_header(FrameHeader(FrameType.CHUNK, opened.key, 1, 0, len(second), len(second), 0, 1))
            peer.send_bytes(header + second[: len(second) // 2])
            eventually(lambda: any(slot.memory[1]))
            expected.fail(FallbackReason.PREFILL_FAILED, "the prefill leg failed")
            before = [bytes(memory) for memory in slot.memory]
            peer.send_bytes(second[len(second) // 2 :])
            opened.chunk(2, b"\x04" * opened.manifest.pieces[2].nbytes)
            assert peer.receive_reason(FrameType.FAIL).reason == "prefill_failed"
            assert peer.receive_reason(FrameType.FAIL).reason == "prefill_failed"
            assert [bytes(memory) for memory in slot.memory] == before

    await asyncio.to_thread(run)
    result = await expected.wait()
    assert result.failure is FallbackReason.PREFILL_FAILED
    assert result.prefix_tokens == 0
    eventually(lambda: ends.receiver_seen.counts["dropped:fenced"] == 2)
    assert ends.receiver_seen.counts["dropped:duplicate"] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"piece": 999}, "bad_chunk"),
        ({"offset": 7}, "bad_chunk"),
        ({"offset": 1 << 40}, "bad_chunk"),
        ({"flags": 0}, "checksum_missing"),
    ],
)
async def test_chunk_outside_the_manifest_is_refused(ends: Ends, changes: dict[str, Any], reason: str) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            opened = Opened(ends, peer, ticket)
            peer.receive_type(FrameType.ACCEPT)
            opened.chunk(0, b"\x01" * opened.manifest.pieces[0].nbytes, **changes)
            assert peer.receive_reason(FrameType.REFUSE).reason == reason

    await asyncio.to_thread(run)
    result = await expected.wait()
    assert result.failure is FallbackReason.LINK_LOST
    assert not any(any(memory) for memory in slot.memory)


async def test_chunk_that_ends_in_the_middle_is_not_counted(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            opened = Opened(ends, peer, ticket)
            peer.receive_type(FrameType.ACCEPT)
            nbytes = opened.manifest.pieces[0].nbytes
            header = pack_header(FrameHeader(FrameType.CHUNK, opened.key, 0, 0, nbytes, nbytes, 0, 1))
            peer.send_bytes(header + bytes(1000))

    await asyncio.to_thread(run)
    result = await expected.wait()
    assert (result.failure, result.stats.chunks) == (FallbackReason.LINK_LOST, 0)


async def test_corrupt_chunk_is_asked_for_again_and_codec_bombs_are_not_decoded(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(1)
    slot = BytesSlot(ends.manifest(1))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            opened = Opened(ends, peer, ticket)
            peer.receive_type(FrameType.ACCEPT)
            for piece in opened.manifest.pieces:
                data = os.urandom(piece.nbytes)
                for changes in ({"checksum": bytes(16)}, {"codec": 1}, {"codec": 2}):
                    opened.chunk(piece.index, data, **changes)
                    header, payload = peer.receive_type(FrameType.NACK)
                    assert header.piece == piece.index
                    assert b"checksum" in payload
                opened.chunk(piece.index, data)
                peer.receive_type(FrameType.ACK)
            peer.receive_type(FrameType.COMPLETE)

    await asyncio.to_thread(run)
    assert (await expected.wait()).complete
    assert ends.receiver_seen.counts["resent:checksum"] == 12


async def test_chunk_of_another_run_or_peer_is_dropped(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    other = ends.pki.name("prefill-other", role="prefill").client()

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            opened = Opened(ends, peer, ticket)
            peer.receive_type(FrameType.ACCEPT)
            data = b"\x01" * opened.manifest.pieces[0].nbytes
            for context, name, generation in ((other, "prefill-other", "g1"), (prefill_context(ends), PREFILL, "g2")):
                with RawPeer(ends.receiver.address, context) as thief:
                    thief.hello(name, FINGERPRINT, generation=generation)
                    thief.receive_type(FrameType.WELCOME)
                    opened.peer = thief
                    opened.chunk(0, data)
                    thief.send(FrameHeader(FrameType.PING))
                    thief.receive_type(FrameType.PONG)
            # A second run of the sender shows the same ticket: a replay, and the first run goes on.
            with RawPeer(ends.receiver.address, prefill_context(ends)) as second:
                Opened(ends, second, ticket, generation="g2")
                assert second.receive_reason(FrameType.FAIL).reason == "ticket_replayed"
            assert not any(slot.memory[0])
            opened.peer = peer
            opened.chunk(0, data)
            peer.receive_type(FrameType.ACK)

    await asyncio.to_thread(run)
    expected.fail(FallbackReason.PREFILL_LOST, "done")
    assert (await expected.wait()).stats.chunks == 1
    assert ends.receiver_seen.counts["dropped:wrong_peer"] == 2


async def test_fail_reaches_the_other_side_at_once_in_both_directions(ends: Ends) -> None:
    await ends.start()
    for side in ("sender", "receiver"):
        ticket = ends.ticket(NUM_TOKENS)
        slot = BytesSlot(ends.manifest(NUM_TOKENS))
        expected = ends.receiver.expect(ticket, slot, timeout_s=30)
        outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=30)
        outgoing.offer(make_pieces(slot.manifest)[:2])
        if side == "sender":
            outgoing.fail(FallbackReason.PREFILL_FAILED, "out of memory")
        else:
            expected.fail(FallbackReason.PREFILL_REFUSED, "the client left")
        async with asyncio.timeout(2):
            result, error = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
        assert isinstance(result, ReceiveResult)
        assert isinstance(error, TransferError)
        assert result.failure == error.reason
        for text in (result.detail, str(error)):
            assert text in ("out of memory", "the client left")
