"""A reservation whose KV may come from several senders, one after the other: each brings what is still missing.

Every sender has a ticket and so a transfer of its own; the former one is fenced before the next one is expected, and
whole pieces that arrived are kept. Half of a piece is thrown away: the next sender brings all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from farfill.core.cluster import FallbackReason
from farfill.core.errors import IncompatiblePeerError, Side, TransferError
from farfill.core.ticket import Ticket
from farfill.engine.protocol import KVSlot
from farfill.transfer.events import Failed, Tick
from farfill.transfer.handover_machine import (
    Expect,
    Fence,
    HandoverEvent,
    HandoverMachine,
    HandoverState,
    NextSender,
    Orphaned,
    Proceed,
    Refused,
    SenderEnded,
    Settled,
)
from farfill.transfer.limits import fallback_reason
from farfill.transfer.protocol import ExpectedTransfer, ReceiveResult, TransferReceiver, TransferStats

_log = structlog.get_logger(__name__)


class HandoverRefusedError(IncompatiblePeerError):
    """Another sender cannot continue: the transfer is over, or the ticket is not for it."""

    reason = "transfer_over"
    side: Side = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverResult:
    """`last` tells how it ended, and what may be used; `earlier` are senders that others took over from.

    `reused_bytes` were brought by `earlier` and not sent again.
    """

    last: ReceiveResult
    earlier: tuple[ReceiveResult, ...] = ()
    reused_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SenderStatus:
    """Of one transfer: whether its sender is listened to; if not, why it failed."""

    state: HandoverState
    reason: FallbackReason = FallbackReason.NONE
    detail: str = ""


class Handover:
    """Owned by the event loop. `follows` hears the id of each transfer that is expected, the first one included.

    `hold_s`: how long what arrived is kept after a sender failed, for another one to be named; 0: not at all.
    """

    def __init__(
        self,
        receiver: TransferReceiver,
        ticket: Ticket,
        slot: KVSlot,
        *,
        timeout_s: float,
        hold_s: float,
        source: str = "",
        follows: Callable[[str, Handover], None] = lambda *_: None,
    ) -> None:
        """Raises what `TransferReceiver.expect` raises."""
        self._receiver = receiver
        self._slot = slot
        self._timeout_s = timeout_s
        self._follows = follows
        self._loop = asyncio.get_running_loop()
        self._machine = HandoverMachine(ticket, hold_s)
        self._results: list[ReceiveResult] = []
        self._answers: dict[NextSender, asyncio.Future[int]] = {}
        self._settled: asyncio.Future[None] = self._loop.create_future()
        self._changed = asyncio.Event()
        self._expected: ExpectedTransfer = self._expect(ticket, source)

    async def wait(self) -> HandoverResult:
        """Returns once: when the set is complete, or nobody will bring the rest. It is fenced then."""
        await asyncio.shield(self._settled)
        manifest, held = self._slot.manifest, self._slot.held
        earlier = self._results[:-1]
        kept = earlier[-1].pieces - held if earlier else frozenset[int]()
        return HandoverResult(
            last=self._results[-1],
            earlier=tuple(earlier),
            reused_bytes=sum(manifest.pieces[piece].nbytes for piece in kept),
        )

    def fail(self, reason: FallbackReason, detail: str) -> None:
        """No other sender will come: use what is there. Idempotent."""
        self._handle(Failed(reason, detail))

    async def proceed(self, transfer_id: str, sender: NextSender, reason: FallbackReason, detail: str) -> int:
        """Let `sender` take the place of `transfer_id`, which failed; returns the bytes it need not bring.

        Raises HandoverRefusedError when it is too late for that, or the ticket is for something else.
        """
        answer: asyncio.Future[int] = self._loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
        self._answers[sender] = answer
        self._handle(Proceed(transfer_id, sender, reason, detail))
        return await asyncio.shield(answer)

    async def status(self, transfer_id: str, wait_s: float) -> SenderStatus:
        """How that transfer stands, as soon as it does not receive any more, or after `wait_s`."""
        end_s = self._loop.time() + wait_s
        while True:
            status = self._status(transfer_id)
            left_s = end_s - self._loop.time()
            if status.state is not HandoverState.RECEIVING or left_s <= 0:
                return status
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _status(self, transfer_id: str) -> SenderStatus:
        machine = self._machine
        if transfer_id != machine.current or machine.state is HandoverState.OVER:
            return SenderStatus(HandoverState.OVER)
        if machine.state is HandoverState.RECEIVING:
            return SenderStatus(HandoverState.RECEIVING)
        return SenderStatus(HandoverState.ORPHANED, self._results[-1].failure, self._results[-1].detail)

    def _handle(self, event: HandoverEvent) -> None:
        for effect in self._machine.handle(event, self._loop.time()):
            match effect:
                case Fence(reason, detail):
                    self._expected.fail(reason, detail)
                case Expect(sender):
                    self._take_over(sender)
                case Orphaned(hold_s):
                    # A little later than the machine looks: timers may fire a moment early.
                    self._loop.call_later(hold_s + 0.001, self._handle, Tick())
                case Refused(sender, reason):
                    self._answer(sender, HandoverRefusedError(_REFUSALS.get(reason, reason), reason=reason))
                case Settled():
                    self._settled.set_result(None)
        self._changed.set()

    def _take_over(self, sender: NextSender) -> None:
        ticket = sender.ticket
        held = self._results[-1].pieces
        manifest = self._slot.manifest
        held_bytes = sum(manifest.pieces[piece].nbytes for piece in held)
        _log.info(
            "transfer_handed_over",
            transfer_id=ticket.transfer_id,
            prefill=ticket.prefill,
            reason=str(self._results[-1].failure),
            held_bytes=held_bytes,
            missing_bytes=manifest.total_bytes - held_bytes,
        )
        try:
            self._expected = self._expect(ticket, sender.source, held)
        except TransferError as error:
            self._answer(sender, error)
            failed = replace(
                self._results[-1], failure=fallback_reason(error.reason), detail=str(error), stats=_NOTHING_CAME
            )
            self._loop.call_soon(self._ended, ticket.transfer_id, failed)
            return
        self._answer(sender, held_bytes)

    def _expect(self, ticket: Ticket, source: str, held: frozenset[int] | None = None) -> ExpectedTransfer:
        expected = self._receiver.expect(ticket, self._slot, timeout_s=self._timeout_s, source=source, held=held)
        waiting = self._loop.create_task(expected.wait(), name=f"farfill-transfer-{ticket.transfer_id}")
        waiting.add_done_callback(
            lambda done: None if done.cancelled() else self._ended(ticket.transfer_id, done.result())
        )
        # After this call, for it may name the next sender at once.
        self._loop.call_soon(self._follows, ticket.transfer_id, self)
        return expected

    def _ended(self, transfer_id: str, result: ReceiveResult) -> None:
        self._results.append(result)
        self._handle(SenderEnded(transfer_id, result.failure))

    def _answer(self, sender: NextSender, answer: int | Exception) -> None:
        waiting = self._answers.pop(sender, None)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, int):
            waiting.set_result(answer)
        else:
            waiting.set_exception(answer)


_NOTHING_CAME = TransferStats(
    raw_bytes=0,
    wire_bytes=0,
    chunks=0,
    resent_chunks=0,
    codec="none",
    connections=0,
    first_byte_s=0.0,
    total_s=0.0,
    after_prefill_s=0.0,
)
_REFUSALS = {
    "transfer_over": "the transfer is over, or never was to be continued",
    "transfer_superseded": "another sender has taken its place already",
    "ticket_replayed": "this ticket was used",
    "ticket_wrong_transfer": "the ticket is for another tenant, worker, model or prompt",
}
