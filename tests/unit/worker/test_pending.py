"""What the gateway says of a transfer from its side: give it up, or who continues, also before it is awaited."""

from __future__ import annotations

import asyncio

import pytest

from farfill.core.cluster import FallbackReason
from farfill.core.ticket import Ticket
from farfill.transfer.handover import Handover, HandoverRefusedError
from farfill.transfer.handover_machine import HandoverState, NextSender
from farfill.transfer.protocol import ReceiveResult, TransferStats
from farfill.worker.pending import MAX_EARLY, MAX_OVER, PendingTransfers
from support.transfer_harness import LAYOUT, BytesSlot, build_manifest

LOST = FallbackReason.PREFILL_LOST
STATS = TransferStats(
    raw_bytes=1,
    wire_bytes=1,
    chunks=1,
    resent_chunks=0,
    codec="none",
    connections=1,
    first_byte_s=0.0,
    total_s=0.0,
    after_prefill_s=0.0,
)


class StubTransfer:
    def __init__(self, held: frozenset[int]) -> None:
        self.held = held
        self.failures: list[tuple[FallbackReason, str]] = []
        self._ended: asyncio.Future[ReceiveResult] = asyncio.get_running_loop().create_future()

    async def wait(self) -> ReceiveResult:
        return await self._ended

    def fail(self, reason: FallbackReason, detail: str) -> None:
        self.failures.append((reason, detail))
        self.end(reason, detail)

    def end(self, reason: FallbackReason, detail: str = "", pieces: frozenset[int] = frozenset()) -> None:
        if not self._ended.done():
            self._ended.set_result(
                ReceiveResult(
                    complete=reason is FallbackReason.NONE,
                    prefix_tokens=0,
                    failure=reason,
                    detail=detail,
                    stats=STATS,
                    pieces=self.held | pieces,
                )
            )


class StubReceiver:
    """Remembers what was expected."""

    address = ""

    def __init__(self) -> None:
        self.transfers: dict[str, StubTransfer] = {}

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def held_transfers(self) -> int:
        return 0

    def expect(self, ticket, slot, *, timeout_s, source="", held=None) -> StubTransfer:
        self.transfers[ticket.transfer_id] = StubTransfer(held or frozenset())
        return self.transfers[ticket.transfer_id]


def ticket(transfer_id: str) -> Ticket:
    return Ticket(
        transfer_id=transfer_id,
        fingerprint="f",
        tenant="t",
        prefill="far",
        decode="near",
        num_tokens=600,
        issued_unix_s=0.0,
        expires_unix_s=60.0,
    )


def begin(pending: PendingTransfers, receiver: StubReceiver, transfer_id: str, hold_s: float = 30.0) -> Handover:
    slot = BytesSlot(build_manifest(LAYOUT, 600))
    return Handover(receiver, ticket(transfer_id), slot, timeout_s=5.0, hold_s=hold_s, follows=pending.follow)


@pytest.fixture
def pending() -> PendingTransfers:
    return PendingTransfers()


@pytest.fixture
def receiver() -> StubReceiver:
    return StubReceiver()


async def test_failure_while_waiting_ends_that_wait_alone(pending: PendingTransfers, receiver: StubReceiver):
    one, other = begin(pending, receiver, "one"), begin(pending, receiver, "other")
    await asyncio.sleep(0)
    assert pending.fail("one", LOST, "gone")
    assert (await one.wait()).last.failure is LOST
    assert receiver.transfers["one"].failures == [(LOST, "gone")]
    assert receiver.transfers["other"].failures == []
    assert len(pending) == 2
    for handover in (one, other):
        pending.over(handover)
    assert len(pending) == 0
    other.fail(LOST, "")
    await other.wait()


async def test_failure_told_before_the_wait_ends_it_at_once_and_only_once(
    pending: PendingTransfers, receiver: StubReceiver
):
    assert not pending.fail("early", FallbackReason.PREFILL_UNREACHABLE, "refused")
    first = begin(pending, receiver, "early")
    assert (await first.wait()).last.failure is FallbackReason.PREFILL_UNREACHABLE
    pending.over(first)
    assert not pending.fail("early", LOST, "it is over: this is not kept")
    second = begin(pending, receiver, "early")
    await asyncio.sleep(0)
    assert receiver.transfers["early"].failures == []
    second.fail(LOST, "")
    await second.wait()


async def test_early_failures_are_bounded_and_the_oldest_goes_first(pending: PendingTransfers, receiver: StubReceiver):
    for i in range(MAX_EARLY + 1):
        pending.fail(str(i), LOST, "")
    oldest, newest = begin(pending, receiver, "0"), begin(pending, receiver, str(MAX_EARLY))
    assert (await newest.wait()).last.failure is LOST
    assert receiver.transfers["0"].failures == []
    oldest.fail(LOST, "")
    await oldest.wait()


async def test_next_sender_brings_only_what_is_missing(pending: PendingTransfers, receiver: StubReceiver):
    handover = begin(pending, receiver, "a")
    await asyncio.sleep(0)
    receiver.transfers["a"].end(FallbackReason.LINK_LOST, "cut", frozenset({0, 2}))
    status = await pending.status("a", 30.0)
    assert status is not None
    assert (status.state, status.reason, status.detail) == (HandoverState.ORPHANED, "link_lost", "cut")
    held_bytes = await pending.proceed("a", NextSender(ticket("b")), FallbackReason.LINK_LOST, "cut")
    assert receiver.transfers["b"].held == {0, 2}
    assert held_bytes == sum(build_manifest(LAYOUT, 600).pieces[piece].nbytes for piece in (0, 2))
    receiver.transfers["b"].end(FallbackReason.NONE)
    result = await handover.wait()
    assert result.last.complete
    assert [one.failure for one in result.earlier] == [FallbackReason.LINK_LOST]
    assert result.reused_bytes == held_bytes
    pending.over(handover)
    with pytest.raises(HandoverRefusedError):
        await pending.proceed("b", NextSender(ticket("c")), LOST, "")
    over = await pending.status("b", 0.0)
    assert over is not None
    assert over.state is HandoverState.OVER


async def test_next_senders_named_before_the_wait_count_in_their_order(
    pending: PendingTransfers, receiver: StubReceiver
):
    assert await pending.proceed("a", NextSender(ticket("b")), LOST, "") == 0
    assert await pending.proceed("b", NextSender(ticket("c")), LOST, "") == 0
    handover = begin(pending, receiver, "a")
    while "c" not in receiver.transfers:
        await asyncio.sleep(0)
    receiver.transfers["c"].end(FallbackReason.NONE)
    result = await handover.wait()
    assert result.last.complete
    assert len(result.earlier) == 2


async def test_status_of_a_sender_at_work_is_told_after_the_wait(pending: PendingTransfers, receiver: StubReceiver):
    handover = begin(pending, receiver, "a")
    await asyncio.sleep(0)
    status = await pending.status("a", 0.0)
    assert status is not None
    assert status.state is HandoverState.RECEIVING
    assert await pending.status("unknown", 0.0) is None
    handover.fail(LOST, "")
    await handover.wait()


async def test_orphan_is_kept_no_longer_than_told(pending: PendingTransfers, receiver: StubReceiver):
    handover = begin(pending, receiver, "a", hold_s=0.01)
    receiver.transfers["a"].end(FallbackReason.TRANSFER_TIMEOUT, "silence")
    result = await asyncio.wait_for(handover.wait(), 10.0)
    assert (result.last.failure, result.last.detail) == (FallbackReason.TRANSFER_TIMEOUT, "silence")
    assert result.earlier == ()


async def test_what_is_remembered_of_old_transfers_is_bounded(pending: PendingTransfers, receiver: StubReceiver):
    for i in range(MAX_OVER + 1):
        handover = begin(pending, receiver, str(i), hold_s=0.0)
        receiver.transfers[str(i)].end(FallbackReason.NONE)
        await handover.wait()
        pending.over(handover)
    assert await pending.status("0", 0.0) is None
    assert await pending.status(str(MAX_OVER), 0.0) is not None
