"""The prefill side of a request: compute the prompt, push its KV while computing, report."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog
from aiohttp import web

from farfill.core.cluster import FallbackReason
from farfill.core.errors import FarfillError, IncompatiblePeerError, InvalidRequestError, TicketError
from farfill.core.ticket import Ticket
from farfill.engine.protocol import Engine, PrefillHandle, PrefillStats, PrefillWork
from farfill.kv.manifest import build_manifest
from farfill.telemetry.metrics import WorkerMetrics
from farfill.transfer.protocol import OutgoingTransfer, TransferSender, TransferStats
from farfill.transfer.tickets import TicketVerifier
from farfill.wire.control import ChunkRetryMessage, PrefillCommand, PrefillReport
from farfill.worker.http import log_as, message_response, read_message
from farfill.worker.media import media_inputs
from farfill.worker.sinks import TransferSink

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PrefillService:
    """POST /v1/prefill. One call is one prefill and one transfer; a closed connection withdraws both."""

    name: str
    engine: Engine
    sender: TransferSender
    verifier: TicketVerifier
    metrics: WorkerMetrics

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers when the receiver has confirmed the complete set, or says why it never will."""
        command = await read_message(request, PrefillCommand)
        log_as(command.request_id)
        ticket = self._checked_ticket(command)
        media = media_inputs(self.engine, command.token_ids, command.media, command.position_offset)
        if media is not None:
            await asyncio.to_thread(media.prepare)
        manifest = build_manifest(self.engine.info.layout, ticket.num_tokens)
        transfer = self.sender.begin(ticket, command.ticket, command.target, manifest, timeout_s=command.timeout_s)
        sink = TransferSink(transfer, asyncio.get_running_loop())
        work = PrefillWork(
            request_id=command.request_id,
            prompt=tuple(command.token_ids),
            cache_salt=command.cache_salt,
            tenant=command.tenant,
            priority=command.priority,
            media=() if media is None else media.material,
            media_inputs=media,
        )
        sending = asyncio.ensure_future(transfer.wait())
        handle: PrefillHandle | None = None
        try:
            handle = self.engine.prefill(work, sink)
            prefill, sent = await _both(sink.done, sending)
        except BaseException as error:
            await self._give_up(transfer, sending, handle, error)
            raise
        finally:
            if handle is not None:
                handle.release()
        self._count(prefill, sent)
        log.info(
            "prefill_served",
            request_id=command.request_id,
            transfer_id=ticket.transfer_id,
            decode=ticket.decode,
            prompt_tokens=len(command.token_ids),
            prefill_s=round(prefill.compute_s, 4),
            transfer_s=round(sent.total_s, 4),
            raw_bytes=sent.raw_bytes,
            wire_bytes=sent.wire_bytes,
        )
        return message_response(_report(prefill, sent))

    def _checked_ticket(self, command: PrefillCommand) -> Ticket:
        ticket = self.verifier.verify(command.ticket)
        if ticket.prefill != self.name:
            raise TicketError(f"the ticket names prefill worker {ticket.prefill!r}", reason="ticket_wrong_peer")
        if ticket.fingerprint != self.engine.info.fingerprint:
            raise IncompatiblePeerError(
                "the ticket is for another model fingerprint than this worker serves",
                reason="fingerprint_mismatch",
            )
        if not 1 <= ticket.num_tokens == len(command.token_ids) - 1:
            raise InvalidRequestError(
                f"the ticket allows {ticket.num_tokens} tokens, the prompt needs {len(command.token_ids) - 1}",
                param="token_ids",
            )
        return ticket

    async def _give_up(
        self,
        transfer: OutgoingTransfer,
        sending: asyncio.Future[TransferStats],
        handle: PrefillHandle | None,
        error: BaseException,
    ) -> None:
        """Stop both halves and wait until no thread reads the KV any more, so that it may be released."""
        if isinstance(error, asyncio.CancelledError):
            reason, outcome, detail = FallbackReason.PREFILL_LOST, "cancelled", "the gateway withdrew the request"
        elif isinstance(error, FarfillError) and handle is None:
            reason, outcome, detail = FallbackReason.PREFILL_REFUSED, "refused", str(error)
        else:
            reason, outcome, detail = FallbackReason.PREFILL_FAILED, "failed", str(error)
        transfer.fail(reason, detail)
        if handle is not None:
            handle.cancel()
        await asyncio.shield(asyncio.wait([sending]))
        sending.exception()
        self.metrics.transfer_finished(outcome, getattr(error, "reason", str(reason)), 0.0, 0, 0)

    def _count(self, prefill: PrefillStats, sent: TransferStats) -> None:
        self.metrics.prefill_finished(prefill.compute_s, prefill.computed_tokens, prefill.cached_tokens)
        self.metrics.transfer_finished("ok", "none", sent.total_s, sent.raw_bytes, sent.wire_bytes)


async def _both(
    prefill: asyncio.Future[PrefillStats], sending: asyncio.Future[TransferStats]
) -> tuple[PrefillStats, TransferStats]:
    """Both results, or the first error of either as soon as it happens."""
    await asyncio.wait([prefill, sending], return_when=asyncio.FIRST_EXCEPTION)
    for future in (prefill, sending):
        if future.done() and future.exception() is not None:
            future.result()
    return prefill.result(), sending.result()


def _report(prefill: PrefillStats, sent: TransferStats) -> PrefillReport:
    return PrefillReport(
        queued_s=prefill.queued_s,
        prefill_s=prefill.compute_s,
        cached_tokens=prefill.cached_tokens,
        computed_tokens=prefill.computed_tokens,
        transfer_s=sent.total_s,
        after_prefill_s=sent.after_prefill_s,
        raw_bytes=sent.raw_bytes,
        wire_bytes=sent.wire_bytes,
        chunks=sent.chunks,
        resent_chunks=sent.resent_chunks,
        codec=sent.codec,
        link_bytes_per_s=sent.link_bytes_per_s or 0.0,
        link_rtt_s=sent.link_rtt_s or 0.0,
        retries=[ChunkRetryMessage(retry.chunk, retry.reason, retry.at_s) for retry in sent.retries],
    )
