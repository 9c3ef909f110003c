"""What hosts do wrong: clocks that jump, memory that goes away under the sender, thousands of garbage connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from threading import Event

import pytest

from farfill.clock import WallClock
from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.transfer.door import MAX_HANDSHAKES
from farfill.transport.memory import MemoryNetwork
from farfill.transport.tcp import split_address
from farfill.wire.frames import FrameType
from support.frame_relay import BACK, FrameRelay, SeenFrame
from support.transfer_harness import DECODE, PREFILL, BytesSlot, Ends, config, eventually, make_pieces, two_ends

NUM_TOKENS = 1100
GARBAGE_CONNECTIONS = 10_000


class JumpingClock(WallClock):
    """The machine's clocks, put forward or back at will."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.monotonic_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.monotonic_s

    def unix_s(self) -> float:
        return super().unix_s() + self.wall_s


class Gate:
    """Holds back one kind of frame until opened; tells when the first one arrived."""

    def __init__(self, frame_type: FrameType) -> None:
        self._type = frame_type
        self.reached = Event()
        self.open = Event()

    def __call__(self, frame: SeenFrame) -> Sequence[bytes]:
        if frame.direction == BACK and frame.type is self._type:
            self.reached.set()
            assert self.open.wait(20)
        return [frame.data]


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


@pytest.fixture
async def ends(tmp_path: Path, clock: JumpingClock) -> AsyncIterator[Ends]:
    async with two_ends(tmp_path, clock=clock) as ends:
        yield ends


async def start(ends: Ends, gate: Gate, compression: str = "none") -> FrameRelay:
    network = MemoryNetwork()
    ends.receiver = ends.make_receiver(listen="decode", transport=network.transport(ends.identity(DECODE, "decode")))
    relay = FrameRelay(network, ends.identity(PREFILL, "prefill"), gate)
    ends.sender = ends.make_sender(transport=relay, config=config(connections=1, compression=compression))
    await ends.start()
    return relay


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
async def test_wall_clock_that_jumps_in_the_middle_changes_nothing(
    ends: Ends, clock: JumpingClock, jump_s: float
) -> None:
    gate = Gate(FrameType.ACK)
    relay = await start(ends, gate)
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    pieces = make_pieces(slot.manifest)
    outgoing.offer(pieces)
    assert await asyncio.to_thread(gate.reached.wait, 10)
    clock.wall_s = jump_s
    gate.open.set()
    outgoing.finish()
    result, _ = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    assert [bytes(data) for _, data in pieces] == [bytes(memory) for memory in slot.memory]
    await ends.close()
    relay.close()


async def test_ticket_is_expired_by_a_clock_that_jumps_before_it_is_used(ends: Ends, clock: JumpingClock) -> None:
    await ends.start()
    ticket = ends.ticket(NUM_TOKENS)
    token = ends.sign(ticket)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    clock.wall_s = 7200.0
    outgoing = ends.sender.begin(ticket, token, ends.receiver.address, slot.manifest, timeout_s=5)
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()
    with pytest.raises(TransferError, match="expired"):
        await outgoing.wait()
    expected.fail(FallbackReason.PREFILL_FAILED, "given up by the test")
    assert not (await expected.wait()).complete


async def test_host_that_slept_for_hours_ends_its_transfers_and_serves_the_next(
    ends: Ends, clock: JumpingClock
) -> None:
    gate = Gate(FrameType.ACK)
    relay = await start(ends, gate)
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    outgoing.offer(make_pieces(slot.manifest))
    assert await asyncio.to_thread(gate.reached.wait, 10)
    clock.monotonic_s = clock.wall_s = 7200.0
    outgoing.finish()
    both = asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    result, sent = await asyncio.wait_for(both, 20)
    gate.open.set()
    assert result.complete or result.failure in (FallbackReason.TRANSFER_TIMEOUT, FallbackReason.LINK_LOST)
    assert result.complete or isinstance(sent, TransferError)

    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()
    after, _ = await asyncio.gather(expected.wait(), outgoing.wait())
    assert after.complete
    await ends.close()
    relay.close()


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
async def test_memory_that_goes_away_under_the_sender_fails_the_transfer_on_both_sides(
    ends: Ends, compression: str
) -> None:
    gate = Gate(FrameType.WELCOME)
    relay = await start(ends, gate, compression)
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=5)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=5)
    pieces = make_pieces(slot.manifest)
    outgoing.offer(pieces)
    outgoing.finish()
    assert await asyncio.to_thread(gate.reached.wait, 10)
    pieces[3][1].release()
    gate.open.set()
    result, sent = await asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    assert not isinstance(result, BaseException)
    assert (result.complete, result.failure) == (False, FallbackReason.PREFILL_FAILED)
    assert isinstance(sent, TransferError)
    assert sent.reason == FallbackReason.PREFILL_FAILED
    assert not [reason for reason in ends.sender_seen.counts if reason == "resent:connection_lost"]
    await ends.close()
    relay.close()


async def test_thousands_of_garbage_connections_leave_nothing_behind(ends: Ends) -> None:
    await ends.start()
    address = split_address(ends.receiver.address)

    def throw() -> None:
        for number in range(GARBAGE_CONNECTIONS):
            with socket.create_connection(address) as sock:
                # Without a reset at the end, ports of this host would run out before their time.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.sendall(os.urandom(16 + number % 64))

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    files = len(os.listdir("/proc/self/fd"))
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=60)
    throwing = asyncio.create_task(asyncio.to_thread(throw))
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=60)
    pieces = make_pieces(slot.manifest)
    outgoing.offer(pieces)
    outgoing.finish()
    result, _ = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    await throwing
    await _moves_with_a_new_sender(ends)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert grown_kib < 64 * 1024
    assert len(os.listdir("/proc/self/fd")) <= files + 64


async def test_silent_strangers_keep_no_peer_out(ends: Ends) -> None:
    """More than may be in a handshake at once, for as long as they like, and a sender that has no connection yet."""
    await ends.start()
    address = split_address(ends.receiver.address)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_HANDSHAKES + 30):
            stack.enter_context(socket.create_connection(address))
        refused = ends.receiver_seen.counts
        await asyncio.to_thread(eventually, lambda: refused["refused:too_many_connections"] >= 30, 30)
        await _moves_with_a_new_sender(ends)
    assert refused["refused:too_many_connections"] < MAX_HANDSHAKES


async def _moves_with_a_new_sender(ends: Ends) -> None:
    sender = ends.make_sender()
    await sender.start()
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=60)
    outgoing = sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=60)
    outgoing.offer(make_pieces(slot.manifest))
    outgoing.finish()
    result, _ = await asyncio.gather(expected.wait(), outgoing.wait())
    assert result.complete
    await sender.close()
