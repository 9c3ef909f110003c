"""Receives KV at a decode worker: accepts connections, checks tickets, and hands chunks to expected transfers.

Nothing from the wire reaches a slot unless the peer's certificate, its ticket, the fingerprint and the layout
all fit. Every refusal has a reason that both sides log; one that concerns an expected transfer ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import structlog

from farfill.clock import Clock
from farfill.config.model import KVTransferConfig
from farfill.core.cluster import FallbackReason
from farfill.core.errors import FarfillError, IncompatiblePeerError, TicketError, TransferError
from farfill.core.layout import KVLayout
from farfill.core.ticket import Ticket
from farfill.engine.protocol import KVSlot
from farfill.topology.estimate import SmoothedValue
from farfill.transfer.acceptor import Acceptor, AcceptorSession
from farfill.transfer.budget import ReceiveBudget
from farfill.transfer.early import SHARE, EarlyChunks, key_of
from farfill.transfer.encoder import lossy_codec
from farfill.transfer.events import Ended
from farfill.transfer.incoming import AwaitedTransfer, ReceiveOptions
from farfill.transfer.limits import fallback_reason, limits_of, liveness_of
from farfill.transfer.observer import GuardedObserver, TransferObserver
from farfill.transfer.protocol import ExpectedTransfer
from farfill.transfer.reach import Reach
from farfill.transfer.tickets import TicketVerifier, check_ticket
from farfill.transport.protocol import Transport
from farfill.transport.tcp import TlsTcpTransport
from farfill.wire.control import PROTOCOL_VERSION
from farfill.wire.frames import (
    ANSWERS_OPEN,
    EarlyGrant,
    FrameHeader,
    FrameType,
    HelloPayload,
    OpenPayload,
    Payload,
    ReasonPayload,
    layout_difference,
    transfer_key,
)

TICK_S = 0.05
MAX_PARKED = 256
LAST_WORDS_COPIES = 3
MAX_ENDED = 65_536
_MIB = 1024 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Parked:
    """A verified OPEN whose transfer is not expected yet."""

    session: AcceptorSession
    ticket: Ticket
    payload: OpenPayload
    until_s: float


@dataclass(frozen=True, slots=True)
class _FailedEarly:
    """A FAIL for a transfer that is not expected yet."""

    peer: str
    payload: ReasonPayload
    until_s: float


@dataclass(frozen=True, slots=True)
class _EndedRecord:
    """A used ticket, remembered until it expires, and what to tell a sender that asks again."""

    peer: str
    generation: str | None
    until_unix_s: float
    outcome: Ended


class KVReceiver:
    """Implements `TransferReceiver`. `transport` replaces TCP (tests, other fabrics).

    Without `listen` it dials: `expect` is given the address where the sender lets it in.
    """

    def __init__(  # noqa: PLR0917 (a composition root calls it once)
        self,
        listen: str | None,
        identity_name: str,
        fingerprint: str,
        layout: KVLayout,
        server_ctx: ssl.SSLContext | None,
        verifier: TicketVerifier,
        config: KVTransferConfig,
        clock: Clock,
        observer: TransferObserver | None = None,
        *,
        transport: Transport | None = None,
        client_ctx: ssl.SSLContext | None = None,
    ) -> None:
        self.me = HelloPayload(PROTOCOL_VERSION, fingerprint, identity_name, uuid.uuid4().hex)
        self.allowed_peers: Sequence[str] = config.allowed_peers
        chunk_bytes = min(config.chunk_size_mb, config.receive_budget_mb // 4) * _MIB
        self.budget = ReceiveBudget(config.receive_budget_mb * _MIB, chunk_bytes)
        self._chunk_limit_bytes = chunk_bytes
        self.early = EarlyChunks(self.budget, config.timeout_ms / 1000, clock.now_s)
        self._layout = layout
        self._verifier = verifier
        self._config = config
        self._clock = clock
        self._observer = GuardedObserver(observer)
        self._lock = Lock()
        self._expected: dict[bytes, AwaitedTransfer] = {}
        self._parked: dict[bytes, _Parked] = {}
        self._failed_early: dict[bytes, _FailedEarly] = {}
        self._ended: OrderedDict[bytes, _EndedRecord] = OrderedDict()
        self._rates: dict[str, SmoothedValue] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._transport = transport = transport or TlsTcpTransport(
            server=server_ctx,
            client=client_ctx,
            sealed=config.encryption == "sealed",
            choose_congestion=config.congestion == "auto",
        )
        self._acceptor = Acceptor(
            listen, transport, self, liveness=liveness_of(config), clock=clock, observer=self._observer
        )
        self._reach: Reach | None = None
        if listen is None:
            connections = None if config.connections == "auto" else config.connections
            self._reach = Reach(self._acceptor, transport, connections, self.expects)

    @property
    def address(self) -> str:
        """See `TransferReceiver`. Before `start` the configured address."""
        return self._acceptor.address

    async def start(self) -> None:
        """Listen. Raises TransportError when the address cannot be bound."""
        self._acceptor.start()
        self._ticker = asyncio.create_task(self._tick(), name="farfill-kv-receive-tick")

    async def close(self) -> None:
        """Fence and fail what is expected, tell senders, end every thread. Idempotent."""
        with self._lock:
            expected = list(self._expected.values())
        for transfer in expected:
            transfer.fail(FallbackReason.LINK_LOST, "the decode worker is shutting down")
        if self._reach is not None:
            await self._reach.close()
        await self._acceptor.close()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None

    def expect(
        self,
        ticket: Ticket,
        slot: KVSlot,
        *,
        timeout_s: float,
        source: str = "",
        held: frozenset[int] | None = None,
    ) -> ExpectedTransfer:
        """See `TransferReceiver`. Raises TicketError for a used ticket, TransferError for a slot of another size."""
        if slot.manifest.num_tokens != ticket.num_tokens:
            raise TransferError(
                f"the ticket is for {ticket.num_tokens} tokens, the slot for {slot.manifest.num_tokens}",
                reason=str(FallbackReason.PROTOCOL),
                side="decode",
            )
        transfer = AwaitedTransfer(
            ticket,
            slot,
            ReceiveOptions(
                limits=limits_of(self._config, timeout_s, self._rate_of(ticket.prefill)),
                chunk_limit_bytes=self._chunk_limit_bytes,
                checksum=self._config.checksum,
                lossy=lossy_codec(self._config),
            ),
            self,
            held=slot.held if held is None else held,
            clock=self._clock,
            observer=self._observer,
        )
        with self._lock:
            if transfer.key in self._ended or transfer.key in self._expected:
                raise TicketError("this ticket was used", reason="ticket_replayed")
            self._expected[transfer.key] = transfer
            parked = self._parked.pop(transfer.key, None)
            failed = self._failed_early.pop(transfer.key, None)
        if source and self._reach is not None:
            self._reach.towards(source, ticket.prefill)
        transfer.begin()
        if failed is not None and failed.peer == ticket.prefill:
            transfer.peer_failed(fallback_reason(failed.payload.reason), failed.payload.detail)
        if parked is not None:
            self._serve_parked(transfer, parked)
        return transfer

    def use_contexts(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        """Certificates and CAs for connections to come; standing ones, and what moves on them, are left alone."""
        if isinstance(self._transport, TlsTcpTransport):
            self._transport.replace_contexts(server=server, client=client)

    def expects(self, peer: str) -> bool:
        """Whether anything is expected from that sender."""
        with self._lock:
            return any(transfer.ticket.prefill == peer for transfer in self._expected.values())

    def held_transfers(self) -> int:
        """See `TransferReceiver`."""
        with self._lock:
            return len(self._expected)

    # What connections report (`acceptor.Host`)

    def peer_connected(self, peer: str, generation: str) -> None:
        """Somebody was welcomed."""
        for transfer in self._of_peer(peer, generation):
            transfer.link(up=True)

    def peer_gone(self, peer: str, generation: str, *, silent: bool) -> None:
        """The last connection of that run of a peer is over; `silent`: it was given up because nothing came."""
        for transfer in self._of_peer(peer, generation):
            transfer.link(up=False, silent=silent)

    def peer_refused(self, peer: str, reason: str, detail: str) -> None:
        """A peer with that certificate may not exchange KV: what is expected from it cannot come."""
        with self._lock:
            waiting = [t for t in self._expected.values() if t.ticket.prefill == peer and not t.opened]
        for transfer in waiting:
            transfer.peer_failed(fallback_reason(reason), f"{reason}: {detail}")

    def early_grant(self, credit_bytes: int) -> EarlyGrant:
        """What a sender with that credit may send before it sees ACCEPT."""
        return EarlyGrant(credit_bytes // SHARE, self._chunk_limit_bytes)

    def may_open(self, session: AcceptorSession, key: bytes) -> bool:
        """Whether this peer may still open that transfer."""
        with self._lock:
            transfer = self._expected.get(key)
            if transfer is None:
                return key not in self._ended and key not in self._failed_early
        return transfer.ticket.prefill == session.peer_name and not transfer.opened

    def opened(self, session: AcceptorSession, key: bytes, payload: OpenPayload) -> None:
        """OPEN: check everything, then serve, park or refuse."""
        try:
            ticket = self._verify(session, key, payload)
        except FarfillError as error:
            self._refuse(session, key, error)
            return
        parked = _Parked(session, ticket, payload, self._clock.now_s() + self._config.timeout_ms / 1000)
        with self._lock:
            record = self._ended.get(key)
            transfer = self._expected.get(key)
            if record is None and transfer is None:
                full = len(self._parked) >= MAX_PARKED and key not in self._parked
                if not full:
                    self._parked[key] = parked
                    return
        if record is not None:
            self._answer_ended(session, key, record)
        elif transfer is not None:
            self._serve(transfer, parked)
        else:
            error = TransferError(f"{MAX_PARKED} transfers wait to be expected", reason="too_many_parked")
            self._refuse(session, key, error)

    def failed(self, session: AcceptorSession, key: bytes, payload: ReasonPayload) -> None:
        """FAIL from a sender."""
        transfer = self.transfer(session, key)
        _log.info("transfer_failed_by_peer", peer=session.peer_name, reason=payload.reason, detail=payload.detail)
        if transfer is not None:
            transfer.peer_failed(fallback_reason(payload.reason), payload.detail or payload.reason)
            return
        with self._lock:
            if key not in self._ended and key not in self._expected and len(self._failed_early) < MAX_PARKED:
                until_s = self._clock.now_s() + self._config.timeout_ms / 1000
                self._failed_early[key] = _FailedEarly(session.peer_name, payload, until_s)
        self.early.turn_away(key_of(session, key))

    def transfer(self, session: AcceptorSession, key: bytes) -> AwaitedTransfer | None:
        """The live transfer of that key, if this peer may speak about it."""
        with self._lock:
            transfer = self._expected.get(key)
        if transfer is None or transfer.ticket.prefill != session.peer_name:
            return None
        return transfer if transfer.generation in (None, session.peer_generation) else None

    def stray(self, session: AcceptorSession, key: bytes) -> str:
        """A frame for no live transfer: repeat how it ended, if it is known. Returns the reason for dropping it."""
        with self._lock:
            record = self._ended.get(key)
            known = key in self._expected
        if record is not None and record.peer == session.peer_name:
            if record.generation == session.peer_generation:
                _tell_outcome(session, key, record.outcome)
            return "fenced"
        if known:
            return "wrong_peer"
        session.send(FrameHeader(FrameType.FAIL, key), ReasonPayload("unknown_transfer", "never opened, or forgotten"))
        return "unknown_transfer"

    # What transfers report (`incoming.Owner`)

    def tell(self, transfer: AwaitedTransfer, header: FrameHeader, payload: Payload | None) -> None:
        """Reach a sender on the newest of its connections; with last words on several, as one may be stuck."""
        copies = LAST_WORDS_COPIES if header.type in (FrameType.COMPLETE, FrameType.FAIL) else 1
        for session in self._acceptor.sessions(transfer.ticket.prefill, transfer.generation)[:copies]:
            session.send(header, payload)

    def ended(self, transfer: AwaitedTransfer, outcome: Ended) -> None:
        """It is fenced: its ticket is used up."""
        until_unix_s = transfer.ticket.expires_unix_s + self._verifier.tolerance_s
        record = _EndedRecord(transfer.ticket.prefill, transfer.generation, until_unix_s, outcome)
        with self._lock:
            self._expected.pop(transfer.key, None)
            self._ended[transfer.key] = record
            rate = transfer.rate_bytes_per_s if outcome.reason is FallbackReason.NONE else None
            if rate is not None:
                self._rates.setdefault(transfer.ticket.prefill, SmoothedValue()).add(rate)
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        self.early.ended(transfer.key)

    def _rate_of(self, peer: str) -> float | None:
        """What that sender's transfers reach, waiting for prefill included: never more than the link carries."""
        with self._lock:
            known = self._rates.get(peer)
            return None if known is None else known.value

    def _verify(self, session: AcceptorSession, key: bytes, payload: OpenPayload) -> Ticket:
        ticket = self._verifier.verify(payload.token)
        check_ticket(ticket, prefill=session.peer_name, decode=self.me.instance, fingerprint=self.me.fingerprint)
        if transfer_key(ticket.transfer_id) != key:
            raise TicketError("for another transfer", reason="ticket_wrong_transfer")
        difference = layout_difference(self._layout, payload)
        if difference is not None:
            raise IncompatiblePeerError(difference, reason="layout_mismatch")
        if payload.lossy != self._config.lossy:
            raise IncompatiblePeerError(
                f"kv_transfer.lossy is {payload.lossy[:64]} there, {self._config.lossy} here", reason="lossy_mismatch"
            )
        if payload.num_tokens != ticket.num_tokens:
            raise IncompatiblePeerError(
                f"{payload.num_tokens} tokens, the ticket says {ticket.num_tokens}", reason="manifest_mismatch"
            )
        return ticket

    def _serve_parked(self, transfer: AwaitedTransfer, parked: _Parked) -> None:
        with self._lock:
            record = self._ended.get(transfer.key)
        if record is None:
            self._serve(transfer, parked)
        else:  # nothing had to come, or the sender failed meanwhile
            self._answer_ended(parked.session, transfer.key, record)

    def _serve(self, transfer: AwaitedTransfer, parked: _Parked) -> None:
        session = parked.session
        if transfer.generation not in (None, session.peer_generation):
            error: FarfillError = TicketError("another run of this peer used it", reason="ticket_replayed")
            self._refuse(session, transfer.key, error, concerns_transfer=False)
            return
        if parked.payload.digest != transfer.manifest.digest:
            error = IncompatiblePeerError("the same tensors, cut into other pieces", reason="manifest_mismatch")
            self._refuse(session, transfer.key, error)
            return
        transfer.generation = session.peer_generation
        transfer.open(parked.payload.chunk_bytes, session)
        self.early.opened(key_of(session, transfer.key))
        if not self._acceptor.sessions(session.peer_name, session.peer_generation):
            transfer.link(up=False)  # it was parked, and its connections went meanwhile

    def _refuse(
        self, session: AcceptorSession, key: bytes, error: FarfillError, *, concerns_transfer: bool = True
    ) -> None:
        self._observer.refused(error.reason)
        _log.warning("transfer_refused", peer=session.peer_name, reason=error.reason, detail=str(error))
        session.send(FrameHeader(FrameType.FAIL, key), ReasonPayload(error.reason, str(error)[:2048]))
        self.early.turn_away(key_of(session, key))
        transfer = self.transfer(session, key) if concerns_transfer else None
        # Its own sender showed something unusable: waiting longer brings nothing.
        if transfer is not None and not transfer.opened:
            transfer.peer_failed(fallback_reason(error.reason), f"{error.reason}: {error}")

    def _answer_ended(self, session: AcceptorSession, key: bytes, record: _EndedRecord) -> None:
        """OPEN for what is over. The sender may not know yet; a ticket that did its work is a replay."""
        same = record.peer == session.peer_name and record.generation in (None, session.peer_generation)
        if same and (record.generation is None or record.outcome.reason is not FallbackReason.NONE):
            _tell_outcome(session, key, record.outcome, attempt=ANSWERS_OPEN)
        else:
            self._refuse(session, key, TicketError("this ticket was used", reason="ticket_replayed"))

    def _of_peer(self, peer: str, generation: str) -> list[AwaitedTransfer]:
        with self._lock:
            return [
                t for t in self._expected.values() if t.ticket.prefill == peer and t.generation in (None, generation)
            ]

    async def _tick(self) -> None:
        while True:
            try:
                self._look_after_transfers()
            except Exception:  # deadlines must go on for everybody else
                _log.exception("transfer_tick_failed")
            await asyncio.sleep(TICK_S)

    def _look_after_transfers(self) -> None:
        self._acceptor.tick()
        with self._lock:
            expected = list(self._expected.values())
        for transfer in expected:
            transfer.tick()
        if self._reach is not None:
            self._reach.tick()
        self._forget()
        self.early.forget()

    def _forget(self) -> None:
        """Refuse what nobody expected in time; drop records of expired tickets."""
        now_s, now_unix_s = self._clock.now_s(), self._clock.unix_s()
        with self._lock:
            late = {key: parked for key, parked in self._parked.items() if now_s >= parked.until_s}
            for key in late:
                del self._parked[key]
            self._failed_early = {k: failed for k, failed in self._failed_early.items() if now_s < failed.until_s}
            while self._ended:
                key, record = next(iter(self._ended.items()))
                if now_unix_s <= record.until_unix_s:
                    break
                del self._ended[key]
        for key, parked in late.items():
            self._refuse(parked.session, key, TransferError("nobody expects it", reason="not_expected"))


def _tell_outcome(session: AcceptorSession, key: bytes, outcome: Ended, *, attempt: int = 0) -> None:
    if outcome.reason is FallbackReason.NONE:
        session.send(FrameHeader(FrameType.COMPLETE, key, attempt=attempt))
    else:
        reason = ReasonPayload(str(outcome.reason), outcome.detail[:2048])
        session.send(FrameHeader(FrameType.FAIL, key), reason)
