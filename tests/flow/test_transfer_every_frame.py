"""One fault at every single frame of a transfer: the end is the right bytes or a typed failure, and nothing is left.

Each case lets a whole transfer run with somebody in the middle who does one thing to frame n of one direction. The
numbers go beyond the last frame, so that every protocol state is met, whatever the protocol's order is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from threading import Lock

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.errors import TransferError
from farfill.transfer.protocol import ReceiveResult
from farfill.transport.memory import MemoryNetwork
from farfill.wire.frames import FrameType
from support.frame_relay import BACK, OUT, CutError, FrameRelay, SeenFrame, Tamper
from support.transfer_harness import (
    DECODE,
    HYBRID,
    PREFILL,
    BytesSlot,
    Ends,
    config,
    make_pieces,
    two_ends,
)

NUM_TOKENS = 1100
# Longest silence where the outcome may be a timeout, and where it must not be, however busy the machine is.
SHORT_S, LONG_S = 1.0, 10.0
# Frames of one undisturbed transfer in one direction stay below this; the test of the count says so.
MOST_FRAMES = 44


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    async with two_ends(tmp_path, HYBRID) as ends:
        yield ends


async def start(ends: Ends, tamper: Tamper) -> FrameRelay:
    network = MemoryNetwork()
    settings = config(connections=2, timeout_ms=1000)
    ends.receiver = ends.make_receiver(
        listen="decode", transport=network.transport(ends.identity(DECODE, "decode")), config=settings
    )
    relay = FrameRelay(network, ends.identity(PREFILL, "prefill"), tamper)
    ends.sender = ends.make_sender(transport=relay, config=settings)
    await ends.start()
    return relay


async def move(ends: Ends, timeout_s: float) -> tuple[ReceiveResult, object]:
    """One transfer; what each side says. Fails when bytes are wrong or a side never ends."""
    ticket = ends.ticket(NUM_TOKENS)
    slot = BytesSlot(ends.manifest(NUM_TOKENS))
    expected = ends.receiver.expect(ticket, slot, timeout_s=timeout_s)
    outgoing = ends.sender.begin(ticket, ends.sign(ticket), ends.receiver.address, slot.manifest, timeout_s=timeout_s)
    pieces = make_pieces(slot.manifest)
    outgoing.offer(pieces)
    outgoing.finish()
    both = asyncio.gather(expected.wait(), outgoing.wait(), return_exceptions=True)
    result, sent = await asyncio.wait_for(both, 20 + timeout_s)
    assert isinstance(result, ReceiveResult)
    if result.complete:
        assert [bytes(data) for _, data in pieces] == [bytes(memory) for memory in slot.memory]
    else:
        assert result.failure is not FallbackReason.NONE
    if isinstance(sent, BaseException):
        assert isinstance(sent, TransferError)
        assert sent.reason
    return result, sent


async def check_once(ends: Ends, tamper: Tamper, timeout_s: float = SHORT_S) -> tuple[ReceiveResult, object]:
    """A transfer with the fault, then one that nobody disturbs any more."""
    armed = [True]
    relay = await start(ends, lambda frame: tamper(frame) if armed[0] else [frame.data])
    try:
        outcome = await move(ends, timeout_s)
        armed[0] = False
        after, _ = await move(ends, LONG_S)
        assert after.complete, "a fault outlived its transfer"
    finally:
        await ends.close()
        relay.close()
    return outcome


async def test_the_numbers_cover_every_frame(ends: Ends) -> None:
    relay = await start(ends, lambda frame: [frame.data])
    result, sent = await move(ends, LONG_S)
    await ends.close()
    relay.close()
    assert result.complete
    assert not isinstance(sent, BaseException)
    for direction, types in (
        (OUT, {FrameType.HELLO, FrameType.OPEN, FrameType.CHUNK, FrameType.FINISH}),
        (BACK, {FrameType.WELCOME, FrameType.ACCEPT, FrameType.ACK, FrameType.COMPLETE}),
    ):
        frames = [frame for frame in relay.seen if frame.direction == direction]
        assert types <= {frame.type for frame in frames}
        assert len(frames) <= MOST_FRAMES


@pytest.mark.parametrize("direction", [OUT, BACK])
@pytest.mark.parametrize("number", range(0, MOST_FRAMES, 2))
async def test_connection_reset_at_any_frame_is_survived(ends: Ends, direction: str, number: int) -> None:
    def tamper(frame: SeenFrame) -> Sequence[bytes]:
        if (frame.direction, frame.number) == (direction, number):
            raise CutError
        return [frame.data]

    result, sent = await check_once(ends, tamper, LONG_S)
    assert result.complete
    assert not isinstance(sent, BaseException)


@pytest.mark.parametrize("direction", [OUT, BACK])
@pytest.mark.parametrize("number", range(1, MOST_FRAMES, 2))
async def test_frame_cut_in_its_middle_is_survived(ends: Ends, direction: str, number: int) -> None:
    def tamper(frame: SeenFrame) -> Iterator[bytes]:
        if (frame.direction, frame.number) == (direction, number):
            yield frame.data[: len(frame.data) // 2]
            raise CutError
        yield frame.data

    result, sent = await check_once(ends, tamper, LONG_S)
    assert result.complete
    assert not isinstance(sent, BaseException)


@pytest.mark.parametrize("direction", [OUT, BACK])
@pytest.mark.parametrize("number", range(0, MOST_FRAMES, 3))
async def test_link_cut_at_any_frame_and_healed_is_survived(ends: Ends, direction: str, number: int) -> None:
    """The cut takes every connection there is, and the next ones that are dialled, before it heals."""
    lock = Lock()
    cuts = [0]

    def tamper(frame: SeenFrame) -> Sequence[bytes]:
        with lock:
            if (frame.direction, frame.number) == (direction, number):
                cuts[0] = 4
            if cuts[0]:
                cuts[0] -= 1
                raise CutError
        return [frame.data]

    result, sent = await check_once(ends, tamper, LONG_S)
    assert result.complete
    assert not isinstance(sent, BaseException)


@pytest.mark.parametrize("direction", [OUT, BACK])
@pytest.mark.parametrize("number", range(0, MOST_FRAMES, 5))
async def test_link_gone_for_good_at_any_frame_ends_with_a_reason(ends: Ends, direction: str, number: int) -> None:
    gone = [False]

    def tamper(frame: SeenFrame) -> Sequence[bytes]:
        if (frame.direction, frame.number) == (direction, number):
            gone[0] = True
        if gone[0]:
            raise CutError
        return [frame.data]

    result, sent = await check_once(ends, tamper)
    if not result.complete:
        assert result.failure in (FallbackReason.LINK_LOST, FallbackReason.TRANSFER_TIMEOUT)
        assert isinstance(sent, TransferError)


@pytest.mark.parametrize("direction", [OUT, BACK])
@pytest.mark.parametrize("number", range(1, MOST_FRAMES, 5))
async def test_frame_that_is_swallowed_ends_in_time(ends: Ends, direction: str, number: int) -> None:
    def tamper(frame: SeenFrame) -> Sequence[bytes]:
        return [] if (frame.direction, frame.number) == (direction, number) else [frame.data]

    result, _ = await check_once(ends, tamper)
    assert result.complete or result.failure in (FallbackReason.LINK_LOST, FallbackReason.TRANSFER_TIMEOUT)


@pytest.mark.parametrize("direction", [OUT, BACK])
@pytest.mark.parametrize("number", range(MOST_FRAMES // 2))
async def test_frame_that_comes_twice_never_harms_the_bytes(ends: Ends, direction: str, number: int) -> None:
    def tamper(frame: SeenFrame) -> Sequence[bytes]:
        return [frame.data, frame.data] if (frame.direction, frame.number) == (direction, number) else [frame.data]

    await check_once(ends, tamper)


@pytest.mark.parametrize("direction", [OUT, BACK])
@pytest.mark.parametrize("number", range(2, MOST_FRAMES // 2))
async def test_frames_in_another_order_never_harm_the_bytes(ends: Ends, direction: str, number: int) -> None:
    """Frame n waits until the next one of its connection has passed."""
    held: list[bytes] = []
    lock = Lock()

    def tamper(frame: SeenFrame) -> Sequence[bytes]:
        with lock:
            if (frame.direction, frame.number) == (direction, number):
                held.append(frame.data)
                return []
            if frame.direction == direction and held:
                return [frame.data, held.pop()]
        return [frame.data]

    await check_once(ends, tamper)
