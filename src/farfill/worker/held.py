"""Prompts prefilled before anybody said where their KV goes: kept for a while, pushed to whoever has a ticket.

A stock router calls prefill first and decode afterwards, and only then does decode know what to ask for. The transfer
begins with what is there by then and goes on while the rest is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import structlog
from aiohttp import web

from farfill.core.cluster import FallbackReason
from farfill.core.errors import CancelledWorkError, IncompatiblePeerError, TicketError, UnavailableError
from farfill.core.ticket import Ticket
from farfill.engine.protocol import Engine, PrefillHandle, PrefillStats, PrefillWork
from farfill.telemetry.metrics import WorkerMetrics
from farfill.transfer.protocol import OutgoingTransfer, TransferSender
from farfill.transfer.tickets import TicketVerifier
from farfill.transport.tls import PeerIdentity
from farfill.wire.held import PushCommand, PushReport
from farfill.worker.http import identity_of, message_response, read_message

log = structlog.get_logger()


class HeldPrefill:
    """A `PrefillSink` that keeps what comes until it is told where to."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pieces: list[tuple[int, memoryview]] = []
        self._transfer: OutgoingTransfer | None = None
        self._error: Exception | None = None
        self.stats: PrefillStats | None = None

    def progress(self) -> None:
        if self._transfer is not None:
            self._transfer.keepalive()

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        with self._lock:
            if self._transfer is None:
                self._pieces += pieces
                return
        self._transfer.offer(pieces)

    def finished(self, stats: PrefillStats) -> None:
        with self._lock:
            self.stats = stats
        if self._transfer is not None:
            self._transfer.finish()

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._error = error
        if self._transfer is not None and not isinstance(error, CancelledWorkError):
            self._transfer.fail(FallbackReason.PREFILL_FAILED, str(error))

    def send(self, transfer: OutgoingTransfer) -> None:
        """From now on everything goes into `transfer`, what came before first. Once."""
        with self._lock:
            transfer.offer(self._pieces)
            self._pieces = []
            self._transfer = transfer
            finished, error = self.stats is not None, self._error
        if error is not None:
            transfer.fail(FallbackReason.PREFILL_FAILED, str(error))
        elif finished:
            transfer.finish()

    def forget(self) -> None:
        """Views of the KV keep its memory: let go of them."""
        with self._lock:
            self._pieces = []


@dataclass(slots=True)
class _Held:
    handle: PrefillHandle
    sink: HeldPrefill
    expiry: asyncio.TimerHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldService:
    """`hold` for the front, POST /v1/exports/{id}/push for decode workers. On one event loop."""

    name: str
    engine: Engine
    sender: TransferSender
    verifier: TicketVerifier
    metrics: WorkerMetrics
    hold_s: float
    _held: dict[str, _Held] = field(default_factory=dict[str, _Held])

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, transfer_id: str, work: PrefillWork) -> None:
        """Begin to prefill `work` and keep its KV for `hold_s`. Raises what `Engine.prefill` raises."""
        sink = HeldPrefill()
        handle = self.engine.prefill(work, sink)
        expiry = asyncio.get_running_loop().call_later(self.hold_s, self._expire, transfer_id)
        self._held[transfer_id] = _Held(handle, sink, expiry)

    async def push(self, request: web.Request) -> web.StreamResponse:
        """Answers when the receiver has confirmed the complete set, or says why it never will."""
        command = await read_message(request, PushCommand)
        ticket = self._checked(command, identity_of(request))
        held = self._held.pop(ticket.transfer_id, None)
        if held is None:
            raise UnavailableError(f"nothing is held for transfer {ticket.transfer_id}", reason="prefill_lost")
        held.expiry.cancel()
        try:
            return message_response(await self._send(command, ticket, held))
        finally:
            held.handle.release()

    async def _send(self, command: PushCommand, ticket: Ticket, held: _Held) -> PushReport:
        manifest = held.handle.manifest
        transfer = self.sender.begin(ticket, command.ticket, command.target, manifest, timeout_s=command.timeout_s)
        sending = asyncio.ensure_future(transfer.wait())
        try:
            held.sink.send(transfer)
            sent = await asyncio.shield(sending)
        except BaseException as error:
            # Until `wait` returned, threads read the KV: it must not be released before.
            transfer.fail(FallbackReason.PREFILL_LOST, "the receiver withdrew the request")
            await asyncio.shield(asyncio.wait([sending]))
            sending.exception()
            self.metrics.transfer_finished("failed", getattr(error, "reason", "cancelled"), 0.0, 0, 0)
            raise
        self.metrics.transfer_finished("ok", "none", sent.total_s, sent.raw_bytes, sent.wire_bytes)
        stats = held.sink.stats
        if stats is not None:
            self.metrics.prefill_finished(stats.compute_s, stats.computed_tokens, stats.cached_tokens)
        log.info(
            "held_prefill_sent",
            transfer_id=ticket.transfer_id,
            decode=ticket.decode,
            transfer_s=round(sent.total_s, 4),
            raw_bytes=sent.raw_bytes,
            wire_bytes=sent.wire_bytes,
        )
        return PushReport(transfer_s=sent.total_s, raw_bytes=sent.raw_bytes, wire_bytes=sent.wire_bytes)

    def _checked(self, command: PushCommand, asks: PeerIdentity | None) -> Ticket:
        """KV goes to whoever asks for it, by certificate, and knows its id; the signature is for the receiver."""
        ticket = self.verifier.read(command.ticket)
        if asks is None or asks.name != ticket.decode:
            raise TicketError(f"{asks} asks for KV to be sent to {ticket.decode!r}", reason="ticket_wrong_peer")
        if ticket.prefill != self.name:
            raise TicketError(f"the ticket names prefill worker {ticket.prefill!r}", reason="ticket_wrong_peer")
        if ticket.fingerprint != self.engine.info.fingerprint:
            raise IncompatiblePeerError("the ticket is for another model fingerprint", reason="fingerprint_mismatch")
        held = self._held.get(ticket.transfer_id)
        if held is not None and held.handle.manifest.num_tokens != ticket.num_tokens:
            raise TicketError("the ticket is for a prompt of another length", reason="ticket_wrong_length")
        return ticket

    def _expire(self, transfer_id: str) -> None:
        held = self._held.pop(transfer_id)
        log.warning("held_prefill_expired", transfer_id=transfer_id, after_s=self.hold_s)
        self.metrics.transfer_finished("failed", "hold_expired", 0.0, 0, 0)
        held.sink.forget()
        held.handle.release()

    def close(self) -> None:
        """Let go of everything that is held."""
        for held in self._held.values():
            held.expiry.cancel()
            held.sink.forget()
            held.handle.release()
        self._held.clear()
