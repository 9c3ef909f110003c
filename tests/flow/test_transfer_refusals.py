"""Peers that must not get through: each is refused with a reason that both sides log, and nothing is held."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TicketError, TransferError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.core.ticket import Ticket
from farfill.kv.manifest import build_manifest
from farfill.transfer.protocol import ReceiveResult
from farfill.transfer.tickets import sign_ticket
from farfill.transport.tcp import split_address
from farfill.wire.frames import (
    FLAG_CHECKSUM,
    FrameHeader,
    FrameType,
    pack_header,
)
from support.pki import make_pki, make_ticket_keys
from support.raw_peer import RawPeer
from support.transfer_harness import (
    DECODE,
    FINGERPRINT,
    LAYOUT,
    PREFILL,
    BytesSlot,
    Ends,
    config,
    eventually,
    make_pieces,
    prefill_context,
)

NUM_TOKENS = 600


def reasons(entries: list[Any], event: str) -> list[str]:
    return [entry["reason"] for entry in entries if entry["event"] == event]


async def attempt(
    ends: Ends, ticket: Ticket, token: str, *, timeout_s: float = 5
) -> tuple[ReceiveResult, TransferError]:
    """A transfer that must fail on both sides, soon."""
    started_s = time.monotonic()
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ends_ticket(ticket), slot, timeout_s=timeout_s)
    outgoing = ends.sender.begin(ticket, token, ends.receiver.address, slot.manifest, timeout_s=timeout_s)
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()
    result, error = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    assert isinstance(result, ReceiveResult)
    assert isinstance(error, TransferError)
    assert not result.complete
    assert result.prefix_tokens == 0
    assert not any(any(memory) for memory in slot.memory), "not a byte reached the slot"
    assert time.monotonic() - started_s < timeout_s, "told at once, not by timeout"
    return result, error


def ends_ticket(ticket: Ticket) -> Ticket:
    """What the gateway told the decode worker: made out to the right peers, whatever the sender shows."""
    return replace(ticket, prefill=PREFILL, decode=DECODE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"issued_unix_s": 0.0, "expires_unix_s": 1.0}, "ticket_expired"),
        ({"issued_unix_s": 9e9, "expires_unix_s": 9e9 + 60}, "ticket_not_yet_valid"),
        ({"prefill": "prefill-other"}, "ticket_wrong_peer"),
        ({"fingerprint": "0" * 64}, "ticket_wrong_fingerprint"),
    ],
)
async def test_unusable_ticket_is_refused(ends: Ends, logged: list[Any], changes: dict[str, Any], reason: str) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS, **changes)
    result, error = await attempt(ends, ticket, ends.sign(ticket))
    assert result.failure is FallbackReason.TICKET_INVALID
    assert reason in result.detail
    assert error.reason == FallbackReason.TICKET_INVALID
    assert reason in str(error)
    assert ends.receiver_seen.counts[f"refused:{reason}"] == 1
    assert reasons(logged, "transfer_refused") == [reason]
    assert reasons(logged, "transfer_failed_by_peer") == [reason]


async def test_ticket_for_another_decode_worker_is_refused(ends: Ends) -> None:
    """Shown by a sender that dials the right worker with a ticket made out to another."""
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    result, error = await attempt(ends, ticket, ends.sign(replace(ticket, decode="decode-other")))
    assert "ticket_wrong_peer" in result.detail
    assert error.reason == FallbackReason.TICKET_INVALID


async def test_forged_ticket_is_refused(ends: Ends) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    result, _ = await attempt(ends, ticket, sign_ticket(ticket, make_ticket_keys()[0]))
    assert result.failure is FallbackReason.TICKET_INVALID
    assert "ticket_forged" in result.detail


async def test_replayed_ticket_is_refused(ends: Ends, logged: list[Any]) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    token = ends.sign(ticket)
    for round_number in range(2):
        slot = BytesSlot(ends.manifest(NUM_TOKENS))
        if round_number:
            with pytest.raises(TicketError, match="used"):
                ends.receiver.expect(ticket, slot, timeout_s=5)
        else:
            expected = ends.receiver.expect(ticket, slot, timeout_s=5)
        outgoing = ends.sender.begin(ticket, token, ends.receiver.address, slot.manifest, timeout_s=5)
        outgoing.offer(make_pieces(slot.manifest))
        outgoing.finish()
        if round_number:
            with pytest.raises(TransferError, match="ticket_replayed"):
                await outgoing.wait()
        else:
            await outgoing.wait()
            assert (await expected.wait()).complete
    assert reasons(logged, "transfer_refused") == ["ticket_replayed"]


async def test_transfer_nobody_expects_is_refused_after_a_while(ends: Ends) -> None:
    ends.receiver = ends.make_receiver(config=config(timeout_ms=200))
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    outgoing = ends.sender.begin(
        ticket, ends.sign(ticket), ends.receiver.address, ends.manifest(NUM_TOKENS), timeout_s=5
    )
    with pytest.raises(TransferError, match="not_expected"):
        await outgoing.wait()
    assert ends.receiver_seen.counts["refused:not_expected"] == 1


async def test_other_fingerprint_is_refused_and_ends_the_wait(ends: Ends, logged: list[Any]) -> None:
    ends.sender = ends.make_sender(fingerprint="0" * 64)
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    result, error = await attempt(ends, ticket, ends.sign(ticket))
    assert result.failure is FallbackReason.FINGERPRINT_MISMATCH
    assert error.reason == FallbackReason.FINGERPRINT_MISMATCH
    assert ends.receiver_seen.counts["refused:fingerprint_mismatch"] >= 1
    assert ends.sender_seen.counts["refused:fingerprint_mismatch"] >= 1
    assert set(reasons(logged, "transfer_connection_refused")) == {"fingerprint_mismatch"}


def other_layout(change: str) -> KVLayout:
    first, *rest = LAYOUT.tensors
    tensors = {
        "missing": tuple(rest),
        "extra": (*LAYOUT.tensors, TensorLayout(9, "k", TensorKind.FULL, "bfloat16", (2, 64))),
        "dtype": (replace(first, dtype="float16"), *rest),
        "shape": (replace(first, row_shape=(1, 128)), *rest),
        "order": (*rest, first),
    }[change]
    return replace(LAYOUT, tensors=tensors)


@pytest.mark.parametrize("change", ["missing", "extra", "dtype", "shape", "order"])
async def test_other_layout_is_refused_naming_the_tensor(ends: Ends, change: str) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    manifest = build_manifest(other_layout(change), NUM_TOKENS)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, manifest, timeout_s=5)
    result, error = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    assert isinstance(result, ReceiveResult)
    assert result.failure is FallbackReason.FINGERPRINT_MISMATCH
    assert isinstance(error, TransferError)
    for text in (result.detail, str(error)):
        assert change in text
        assert change == "order" or "tensor 'k' of layer" in text


async def test_receiver_with_another_name_is_refused_by_the_sender(ends: Ends, logged: list[Any]) -> None:
    ends.receiver = ends.make_receiver(name="decode-impostor")
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    outgoing = ends.sender.begin(
        ticket, ends.sign(ticket), ends.receiver.address, ends.manifest(NUM_TOKENS), timeout_s=5
    )
    with pytest.raises(TransferError, match="decode-impostor"):
        await outgoing.wait()
    assert "identity_refused" in reasons(logged, "transfer_connection_refused")


async def test_certificate_of_another_ca_is_refused_on_both_sides(
    ends: Ends, tmp_path: Path, logged: list[Any]
) -> None:
    stranger = make_pki(tmp_path / "other").name(PREFILL, role="prefill")
    own_ca = ends.pki.ca.read_bytes()
    stranger.ca.write_bytes(own_ca)  # it trusts the receiver, the receiver does not trust it
    ends.sender = ends.make_sender(client_ctx=stranger.client())
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    outgoing = ends.sender.begin(
        ticket, ends.sign(ticket), ends.receiver.address, ends.manifest(NUM_TOKENS), timeout_s=5
    )
    with pytest.raises(TransferError, match=r"tls: .*unknown ca") as caught:
        await outgoing.wait()
    assert caught.value.reason == FallbackReason.PROTOCOL
    eventually(lambda: {None, DECODE} == {entry["peer"] for entry in logged})
    assert set(reasons(logged, "transfer_connection_refused")) == {"identity_refused"}


async def test_flood_of_strangers_is_counted_in_full_but_logged_in_few_lines(ends: Ends, logged: list[Any]) -> None:
    await ends.start()
    host, port = ends.receiver.address.rsplit(":", 1)
    for _ in range(25):
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1024):
                pass
    eventually(lambda: sum(n for key, n in ends.receiver_seen.counts.items() if key.startswith("refused:")) == 25)
    assert len(reasons(logged, "transfer_connection_refused")) == 10
    await ends.receiver.close()
    (told,) = [entry for entry in logged if entry["event"] == "transfer_connection_refused_left_out"]
    assert told["count"] == 15


async def test_receiver_of_another_ca_is_refused_by_the_sender(ends: Ends, tmp_path: Path) -> None:
    ends.sender = ends.make_sender(client_ctx=make_pki(tmp_path / "other").name(PREFILL, role="prefill").client())
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    outgoing = ends.sender.begin(
        ticket, ends.sign(ticket), ends.receiver.address, ends.manifest(NUM_TOKENS), timeout_s=5
    )
    with pytest.raises(TransferError, match="tls: "):
        await outgoing.wait()


def anonymous(ends: Ends) -> ssl.SSLContext:
    (context := ssl.create_default_context(cafile=str(ends.pki.ca))).check_hostname = False
    return context


async def test_peer_without_certificate_is_refused(ends: Ends, logged: list[Any]) -> None:
    await ends.start()

    def run() -> None:
        with RawPeer(ends.receiver.address, anonymous(ends)) as peer:
            peer.hello(PREFILL, FINGERPRINT)
            with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
                peer.receive()

    await asyncio.to_thread(run)
    await asyncio.to_thread(eventually, lambda: "did not return a certificate" in str(logged))
    assert ends.receiver_seen.counts["refused:identity_refused"] == 1


@pytest.mark.parametrize(
    ("uri", "words"),
    [("https://example.org/", "has 0"), ("farfill://test/near/prefill", "is no farfill")],
)
async def test_certificate_without_identity_is_refused(ends: Ends, logged: list[Any], uri: str, words: str) -> None:
    await ends.start()
    context = ends.pki.name("odd", uri=uri).client()

    def run() -> None:
        with RawPeer(ends.receiver.address, context) as peer:
            peer.hello("odd", FINGERPRINT)
            assert peer.ended()

    await asyncio.to_thread(run)
    eventually(lambda: ends.receiver_seen.counts["refused:identity_refused"] == 1)
    assert words in str(logged)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"protocol_version": 2}, "protocol_version"),
        ({"fingerprint": "0" * 64}, "fingerprint_mismatch"),
        ({"instance": "prefill-other"}, "wrong_name"),
    ],
)
async def test_hello_that_does_not_fit_gets_the_reason(ends: Ends, hello: dict[str, Any], reason: str) -> None:
    await ends.start()

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            peer.hello(**{"instance": PREFILL, "fingerprint": FINGERPRINT, **hello})
            assert peer.receive_reason(FrameType.REFUSE).reason == reason
            assert peer.ended()

    await asyncio.to_thread(run)
    assert ends.receiver_seen.counts[f"refused:{reason}"] == 1


async def test_frame_of_another_version_gets_the_reason(ends: Ends) -> None:
    await ends.start()

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            peer.send_bytes(pack_header(FrameHeader(FrameType.HELLO), version=2))
            refusal = peer.receive_reason(FrameType.REFUSE)
            assert (refusal.reason, "version 2 there, 1 here" in refusal.detail) == ("protocol_version", True)

    await asyncio.to_thread(run)
    eventually(lambda: ends.receiver_seen.counts["refused:protocol_version"] == 1)


def bad_frames() -> dict[str, bytes]:
    good = FrameHeader(FrameType.PING)
    return {
        "garbage": os.urandom(256),
        "unknown_type": pack_header(good)[:5] + b"\x63" + pack_header(good)[6:],
        "unknown_flags": pack_header(replace(good, flags=0x80)),
        "oversize_control": pack_header(replace(good, type=FrameType.OPEN, wire_bytes=2**31)),
        "oversize_chunk": pack_header(
            FrameHeader(FrameType.CHUNK, raw_bytes=2**31, wire_bytes=2**31, flags=FLAG_CHECKSUM)
        ),
        "empty_chunk": pack_header(FrameHeader(FrameType.CHUNK)),
        "expanding_chunk": pack_header(FrameHeader(FrameType.CHUNK, raw_bytes=10, wire_bytes=20, codec=1)),
        "malformed_open": pack_header(FrameHeader(FrameType.OPEN, wire_bytes=3)) + b"\xc1\xc1\xc1",
        "hello_twice": pack_header(FrameHeader(FrameType.HELLO)),
        "answer_of_a_receiver": pack_header(FrameHeader(FrameType.ACK)),
    }


@pytest.mark.parametrize("name", list(bad_frames()))
async def test_broken_frame_ends_the_connection_with_the_reason(ends: Ends, name: str) -> None:
    await ends.start()

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            peer.hello(PREFILL, FINGERPRINT)
            peer.receive_type(FrameType.WELCOME)
            peer.send_bytes(bad_frames()[name])
            assert peer.receive_reason(FrameType.REFUSE).reason in ("bad_frame", "oversize")
            assert peer.ended()

    await asyncio.to_thread(run)
    counts = ends.receiver_seen.counts
    eventually(lambda: counts["refused:bad_frame"] + counts["refused:oversize"] == 1)


async def test_frame_before_hello_is_refused(ends: Ends) -> None:
    await ends.start()

    def run() -> None:
        with RawPeer(ends.receiver.address, prefill_context(ends)) as peer:
            peer.send(FrameHeader(FrameType.PING))
            assert peer.receive_reason(FrameType.REFUSE).reason == "bad_frame"

    await asyncio.to_thread(run)


async def test_garbage_and_silent_connections_do_not_disturb_a_transfer(ends: Ends) -> None:
    await ends.start()
    address = split_address(ends.receiver.address)
    idle = [socket.create_connection(address) for _ in range(20)]
    try:
        for _ in range(50):
            with socket.create_connection(address) as sock:
                sock.sendall(os.urandom(64))
        ticket = ends.ticket(NUM_TOKENS)
        slot = BytesSlot(ends.manifest(NUM_TOKENS))
        expected = ends.receiver.expect(ticket, slot, timeout_s=5)
        outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
        outgoing.offer(make_pieces(slot.manifest))
        outgoing.finish()
        assert (await expected.wait()).complete
        await outgoing.wait()
    finally:
        for sock in idle:
            sock.close()


async def test_token_never_appears_in_the_log(ends: Ends, logged: list[Any]) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS, issued_unix_s=0.0, expires_unix_s=1.0)
    token = ends.sign(ticket)
    await attempt(ends, ticket, token)
    assert logged
    assert token not in str(logged)
    assert token.split(".")[1] not in str(logged)
