"""One reservation of KV memory across its senders as a pure machine: `handle(event, now_s) -> effects`.

receiving ⇄ orphaned → over. A sender that failed leaves the reservation orphaned: what it brought is kept for as long
as `hold_s`, and another sender may be named under a ticket of its own. At any time at most one transfer may write into
the slot: the next one is expected only after the end of the former, which is fenced then. No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from farfill.core.cluster import FallbackReason
from farfill.core.ticket import Ticket
from farfill.transfer.events import Failed, Tick

# The client left, or decode itself has no room: no other sender could help.
_FINAL = frozenset({FallbackReason.WITHDRAWN, FallbackReason.KV_MEMORY})


class HandoverState(StrEnum):
    """What a reservation is doing."""

    RECEIVING = "receiving"
    ORPHANED = "orphaned"
    OVER = "over"


@dataclass(frozen=True, slots=True, eq=False)
class NextSender:
    """Who shall continue, as named by one command. `source` is where it lets this side in, when this side dials."""

    ticket: Ticket
    source: str = ""


# Events


@dataclass(frozen=True, slots=True)
class SenderEnded:
    """That transfer is over and fenced; NONE: the set is complete."""

    transfer_id: str
    reason: FallbackReason


@dataclass(frozen=True, slots=True)
class Proceed:
    """`transfer_id` has failed, as somebody else saw it: `sender` takes its place."""

    transfer_id: str
    sender: NextSender
    reason: FallbackReason
    detail: str


# `Failed`: no other sender will come.
HandoverEvent = SenderEnded | Proceed | Failed | Tick

# Effects


@dataclass(frozen=True, slots=True)
class Fence:
    """End the current transfer; `SenderEnded` follows."""

    reason: FallbackReason
    detail: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Expect this sender now, for what is missing. Its being named was right."""

    sender: NextSender


@dataclass(frozen=True, slots=True)
class Orphaned:
    """Nobody sends now: keep what is there, look again in `hold_s`."""

    hold_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """This sender will not be expected, because of `reason`."""

    sender: NextSender
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The last effect: complete, or whatever the last transfer ended with."""


HandoverEffect = Fence | Expect | Orphaned | Refused | Settled


class HandoverMachine:
    """`first` is the ticket of the transfer that is expected from the start. `hold_s` 0: nobody ever continues."""

    def __init__(self, first: Ticket, hold_s: float) -> None:
        self._first = first
        self._hold_s = hold_s
        self._used = {first.transfer_id}
        self._current = first.transfer_id
        self._next: NextSender | None = None
        self._given_up = False
        self._orphaned_s = 0.0
        self.state = HandoverState.RECEIVING

    @property
    def current(self) -> str:
        """The transfer that sends now, or sent last."""
        return self._current

    def handle(self, event: HandoverEvent, now_s: float) -> list[HandoverEffect]:
        """Advance. After the end senders are refused, and nothing else happens."""
        match event:
            case Proceed():
                return self._proceed(event)
            case _ if self.state is HandoverState.OVER:
                return []
            case SenderEnded(transfer_id, reason):
                return self._ended(transfer_id, reason, now_s)
            case Failed(reason, detail):
                self._given_up = True
                return self._settle() if self.state is HandoverState.ORPHANED else [Fence(reason, detail)]
            case Tick():
                late = self.state is HandoverState.ORPHANED and now_s - self._orphaned_s >= self._hold_s
                return self._settle() if late else []

    def _proceed(self, event: Proceed) -> list[HandoverEffect]:
        problem = self._problem(event)
        if problem is not None:
            return [Refused(event.sender, problem)]
        self._used.add(event.sender.ticket.transfer_id)
        if self.state is HandoverState.ORPHANED:
            return self._expect(event.sender)
        self._next = event.sender
        return [Fence(event.reason, event.detail)]

    def _problem(self, event: Proceed) -> str | None:
        ticket, first = event.sender.ticket, self._first
        if self.state is HandoverState.OVER or self._given_up or self._hold_s <= 0:
            return "transfer_over"
        if event.transfer_id != self._current or self._next is not None:
            return "transfer_superseded"
        if ticket.transfer_id in self._used:
            return "ticket_replayed"
        same = (ticket.tenant, ticket.decode, ticket.fingerprint, ticket.num_tokens)
        if same != (first.tenant, first.decode, first.fingerprint, first.num_tokens):
            return "ticket_wrong_transfer"
        return None

    def _ended(self, transfer_id: str, reason: FallbackReason, now_s: float) -> list[HandoverEffect]:
        if transfer_id != self._current or self.state is HandoverState.ORPHANED:
            return []
        if reason is FallbackReason.NONE or self._given_up or reason in _FINAL or self._hold_s <= 0:
            return self._settle()
        if self._next is not None:
            return self._expect(self._next)
        self.state, self._orphaned_s = HandoverState.ORPHANED, now_s
        return [Orphaned(self._hold_s)]

    def _expect(self, sender: NextSender) -> list[HandoverEffect]:
        self._current, self._next = sender.ticket.transfer_id, None
        self.state = HandoverState.RECEIVING
        return [Expect(sender)]

    def _settle(self) -> list[HandoverEffect]:
        self.state = HandoverState.OVER
        refused, self._next = self._next, None
        return [Settled()] if refused is None else [Refused(refused, "transfer_over"), Settled()]
