"""The decode side of a request: await the prompt's KV or prefill here, then stream tokens.

The HTTP status goes out with the first token, so a request that cannot be served is never a 200.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import msgspec
import structlog
from aiohttp import web

from farfill.core.cluster import FallbackReason
from farfill.core.errors import CapacityError, FarfillError, InvalidRequestError, UnavailableError
from farfill.core.priority import check_priority
from farfill.core.sampling import SamplingParams
from farfill.core.ticket import Ticket
from farfill.engine.protocol import Engine, GenerateWork, KeepsCheckpoints, KVSlot, PrefillStats, TokenEvent
from farfill.telemetry.metrics import WorkerMetrics
from farfill.transfer.handover import Handover, HandoverResult
from farfill.transfer.handover_machine import NextSender
from farfill.transfer.protocol import TransferReceiver
from farfill.transfer.tickets import TicketVerifier
from farfill.wire.control import (
    CONTENT_TYPE,
    ContinueCommand,
    ContinueReply,
    DecodeCommand,
    EndEvent,
    FailedEvent,
    FailTransferCommand,
    LogprobMessage,
    SamplingMessage,
    StartEvent,
    TokensEvent,
    TransferStatus,
)
from farfill.wire.events import encode_event
from farfill.worker.http import log_as, message_response, read_message
from farfill.worker.media import media_inputs
from farfill.worker.pending import PendingTransfers
from farfill.worker.sinks import TokenQueue
from farfill.worker.text import prompt_ids

log = structlog.get_logger()

MAX_STATUS_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKV:
    """Where a prompt's KV came from: the slot to start from, and what waiting for it cost."""

    slot: KVSlot | None = None
    valid_tokens: int = 0
    received: HandoverResult | None = None
    transfer_id: str = ""
    fallback: FallbackReason = FallbackReason.NONE
    detail: str = ""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeService:
    """POST /v1/decode and what concerns its transfer. A closed connection frees everything at once."""

    name: str
    engine: Engine
    receiver: TransferReceiver
    verifier: TicketVerifier
    metrics: WorkerMetrics
    pending: PendingTransfers = field(default_factory=PendingTransfers)
    lossy: str = ""
    """The lossy form received KV travelled in (`kv_transfer.lossy`); empty: all is exact."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Streams `StartEvent`, `TokensEvent`s, then `EndEvent` or `FailedEvent`."""
        started_s = asyncio.get_running_loop().time()
        command = await read_message(request, DecodeCommand)
        log_as(command.request_id)
        work = self._checked_work(command)
        outcome = "cancelled"
        try:
            response, outcome = await self._serve(request, command, work, started_s)
            return response
        except FarfillError as error:
            outcome = error.reason
            raise
        finally:
            self.metrics.request_finished(outcome)

    async def fail_transfer(self, request: web.Request) -> web.StreamResponse:
        """The gateway heard that the prefill leg failed: end the wait now, also if it has not begun."""
        command = await read_message(request, FailTransferCommand)
        reason = _fallback_reason(command.reason)
        known = self.pending.fail(request.match_info["transfer_id"], reason, command.detail)
        log.info(
            "transfer_failed_by_gateway",
            transfer_id=request.match_info["transfer_id"],
            reason=str(reason),
            known=known,
        )
        return message_response(command)

    async def continue_transfer(self, request: web.Request) -> web.StreamResponse:
        """The gateway names another sender for what is missing, under a fresh ticket."""
        command = await read_message(request, ContinueCommand)
        sender = NextSender(self.verifier.verify(command.ticket), command.source)
        transfer_id, reason = request.match_info["transfer_id"], _fallback_reason(command.reason)
        held_bytes = await self.pending.proceed(transfer_id, sender, reason, command.detail)
        return message_response(ContinueReply(held_bytes=held_bytes))

    async def transfer_status(self, request: web.Request) -> web.StreamResponse:
        """Answers once the transfer's sender is not listened to any more, at most `wait_s` from now."""
        try:
            wait_s = min(max(float(request.query.get("wait_s", "0")), 0.0), MAX_STATUS_WAIT_S)
        except ValueError:
            raise InvalidRequestError("wait_s must be a number of seconds", param="wait_s") from None
        status = await self.pending.status(request.match_info["transfer_id"], wait_s)
        if status is None:
            return message_response(TransferStatus(state="unknown"))
        reason = "" if status.reason is FallbackReason.NONE else str(status.reason)
        return message_response(TransferStatus(state=str(status.state), reason=reason, detail=status.detail))

    def _checked_work(self, command: DecodeCommand) -> GenerateWork:
        info = self.engine.info
        sampling = _sampling(command.sampling)
        if command.text:
            command.token_ids = prompt_ids(self.engine, command)
            if not command.token_ids:
                raise InvalidRequestError("the prompt has no tokens", param="prompt")
        total = len(command.token_ids) + sampling.max_tokens
        if not command.token_ids or sampling.max_tokens < 1 or total > info.max_context_tokens:
            raise InvalidRequestError(
                f"{len(command.token_ids)} prompt tokens and max_tokens {sampling.max_tokens} "
                f"do not fit the context of {info.max_context_tokens} tokens",
                param="token_ids",
                reason="context_length_exceeded",
            )
        if not all(0 <= token < info.vocab_size for token in command.token_ids):
            raise InvalidRequestError(f"token ids must be in [0, {info.vocab_size})", param="token_ids")
        media = media_inputs(self.engine, command.token_ids, command.media, command.position_offset)
        return GenerateWork(
            request_id=command.request_id,
            prompt=tuple(command.token_ids),
            cache_salt=command.cache_salt,
            tenant=command.tenant,
            priority=check_priority(command.priority),
            sampling=sampling,
            media=() if media is None else media.material,
            media_inputs=media,
        )

    async def _serve(
        self, request: web.Request, command: DecodeCommand, work: GenerateWork, started_s: float
    ) -> tuple[web.StreamResponse, str]:
        loop = asyncio.get_running_loop()
        prepared = self.engine.prepare(work.sampling)
        prompt = await self._await_kv(command, work, started_s)
        queue = TokenQueue(loop)
        try:
            await asyncio.wrap_future(prepared)
            if work.media_inputs is not None and prompt.valid_tokens < len(work.prompt) - 1:
                await asyncio.to_thread(work.media_inputs.prepare)
            if prompt.slot is not None:
                work = self._apart(work)
            running = self.engine.generate(work, queue, slot=prompt.slot, valid_tokens=prompt.valid_tokens)
        except BaseException:
            if prompt.slot is not None:
                prompt.slot.release()
            raise
        try:
            first = await queue.next_events()
            prompt = self._as_loaded(command, prompt, queue.stats)
            start = _start_event(command, prompt, queue.stats, loop.time() - started_s)
            if self.lossy and prompt.valid_tokens:
                start.lossy = self.lossy
                self.metrics.lossy_request(self.lossy)
            response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
            await response.prepare(request)
            await response.write(encode_event(start) + _encode_tokens(first))
            outcome = await self._stream(response, queue, first, work.sampling.n)
            log.info(
                "decode_served",
                request_id=command.request_id,
                outcome=outcome,
                prefilled_at=start.prefilled_at,
                fallback=start.fallback,
                prompt_tokens=start.prompt_tokens,
                cached_tokens=start.cached_tokens,
                kv_wait_s=round(start.kv_wait_s, 4),
                first_token_s=round(start.first_token_s, 4),
                total_s=round(loop.time() - started_s, 4),
            )
            return response, outcome
        finally:
            running.cancel()

    def _as_loaded(self, command: DecodeCommand, prompt: PromptKV, stats: PrefillStats | None) -> PromptKV:
        """What arrived whole may still not be usable for the engine, which knows with the first token."""
        if stats is None or not stats.kv_problem:
            return prompt
        # The slot is the engine's by now.
        without = replace(prompt, slot=None, valid_tokens=0)
        if prompt.fallback is not FallbackReason.NONE:
            return without  # it counts as what went wrong first
        without = replace(without, fallback=FallbackReason.KV_NOT_LOADED, detail=stats.kv_problem)
        return self._fallen_back(command, without, prompt.transfer_id)

    def _apart(self, work: GenerateWork) -> GenerateWork:
        """Work on KV from elsewhere: prefixes that may hold lossy KV are reused for such work only, never unmarked."""
        return replace(work, cache_salt=f"lossy:{self.lossy}\0{work.cache_salt}") if self.lossy else work

    async def _stream(
        self, response: web.StreamResponse, queue: TokenQueue, first: list[TokenEvent], choices: int
    ) -> str:
        """Write events until each choice finished; returns the outcome ("ok", or why it broke)."""
        outcome = "ok"
        tokens = sum(len(event.token_ids) for event in first)
        finished = sum(event.finish_reason is not None for event in first)
        try:
            while finished < choices:
                events = await queue.next_events()
                tokens += sum(len(event.token_ids) for event in events)
                finished += sum(event.finish_reason is not None for event in events)
                await response.write(_encode_tokens(events))
            last = EndEvent(completion_tokens=tokens)
        except FarfillError as error:
            log.error("generation_broke", reason=error.reason, error=str(error))
            outcome = error.reason
            last = FailedEvent(reason=error.reason, message=str(error), side=error.side)
        await response.write(encode_event(last))
        await response.write_eof()
        return outcome

    async def _await_kv(self, command: DecodeCommand, work: GenerateWork, started_s: float) -> PromptKV:
        """The KV a far prefill pushes, or why there is none. Raises UnavailableError without fallback."""
        if not command.ticket:
            return PromptKV()
        ticket = self.verifier.verify(command.ticket)
        if ticket.fingerprint != self.engine.info.fingerprint:
            mismatch = PromptKV(
                fallback=FallbackReason.FINGERPRINT_MISMATCH,
                detail="the ticket is for another model fingerprint than this worker serves",
            )
            return self._fallen_back(command, mismatch, ticket.transfer_id)
        try:
            slot = self.engine.reserve(self._apart(work))
        except CapacityError as error:
            return self._fallen_back(
                command, PromptKV(fallback=FallbackReason.KV_MEMORY, detail=str(error)), ticket.transfer_id
            )
        try:
            result = await self._receive(command, ticket, slot)
        except BaseException:
            slot.release()
            raise
        last = result.last
        if isinstance(slot, KeepsCheckpoints):
            slot.received(last.pieces)
        prompt = PromptKV(
            slot=slot,
            valid_tokens=last.prefix_tokens,
            received=result,
            transfer_id=ticket.transfer_id,
            fallback=FallbackReason.NONE if last.complete else last.failure,
            detail=last.detail,
            wait_s=asyncio.get_running_loop().time() - started_s,
        )
        self._count(result)
        return prompt if last.complete else self._fallen_back(command, prompt, ticket.transfer_id)

    async def _receive(self, command: DecodeCommand, ticket: Ticket, slot: KVSlot) -> HandoverResult:
        handover = Handover(
            self.receiver,
            ticket,
            slot,
            timeout_s=command.timeout_s,
            hold_s=command.hold_s,
            source=command.source,
            follows=self.pending.follow,
        )
        try:
            return await _wait_fenced(handover)
        finally:
            self.pending.over(handover)

    def _count(self, result: HandoverResult) -> None:
        for outcome, one in (
            *(("continued", earlier) for earlier in result.earlier),
            ("ok" if result.last.complete else "failed", result.last),
        ):
            stats = one.stats
            reason = str(FallbackReason.NONE if one.complete else one.failure)
            self.metrics.transfer_finished(outcome, reason, stats.total_s, stats.raw_bytes, stats.wire_bytes)
        self.metrics.bytes_reused(result.reused_bytes)

    def _fallen_back(self, command: DecodeCommand, prompt: PromptKV, transfer_id: str) -> PromptKV:
        self.metrics.fallback(str(prompt.fallback))
        log.warning(
            "fallback",
            request_id=command.request_id,
            transfer_id=transfer_id,
            reason=str(prompt.fallback),
            detail=prompt.detail,
            usable_tokens=prompt.valid_tokens,
            allowed=command.allow_fallback,
        )
        if command.allow_fallback:
            return prompt
        if prompt.slot is not None:
            prompt.slot.release()
        raise UnavailableError(
            f"far prefill failed ({prompt.fallback}: {prompt.detail}) and fallback_to_local_prefill is off",
            reason=str(prompt.fallback),
            side="link",
        )


async def _wait_fenced(handover: Handover) -> HandoverResult:
    """Wait for the KV; when cancelled, fence the transfer first, so that the slot may be released."""
    waiting = asyncio.ensure_future(handover.wait())
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        handover.fail(FallbackReason.WITHDRAWN, "the client went away")
        await asyncio.wait([waiting])
        raise


def _fallback_reason(text: str) -> FallbackReason:
    try:
        return FallbackReason(text)
    except ValueError:
        return FallbackReason.PREFILL_FAILED


def _sampling(message: SamplingMessage) -> SamplingParams:
    fields = msgspec.structs.asdict(message)
    fields["stop"] = tuple(message.stop)
    fields["stop_token_ids"] = tuple(message.stop_token_ids)
    fields["bad_words"] = tuple(message.bad_words)
    fields["allowed_token_ids"] = tuple(message.allowed_token_ids)
    return SamplingParams(**fields)


def _start_event(
    command: DecodeCommand, prompt: PromptKV, stats: PrefillStats | None, first_token_s: float
) -> StartEvent:
    received = prompt.received
    senders = [] if received is None else [*received.earlier, received.last]
    remote = received is not None and received.last.complete and prompt.fallback is FallbackReason.NONE
    prompt_tokens = len(command.token_ids)
    cached_tokens, computed_tokens = (0, 0) if stats is None else (stats.cached_tokens, stats.computed_tokens)
    return StartEvent(
        prefilled_at="remote" if remote else "local",
        fallback=str(prompt.fallback),
        fallback_detail=prompt.detail if prompt.fallback is not FallbackReason.NONE else "",
        prompt_tokens=prompt_tokens,
        # What far prefill could skip is in its own report.
        cached_tokens=0 if remote else cached_tokens,
        received_tokens=prompt_tokens - 1 - cached_tokens - computed_tokens if prompt.slot is not None else 0,
        computed_tokens=computed_tokens,
        kv_wait_s=prompt.wait_s,
        transfer_s=sum(one.stats.total_s for one in senders),
        raw_bytes=sum(one.stats.raw_bytes for one in senders),
        wire_bytes=sum(one.stats.wire_bytes for one in senders),
        queued_s=stats.queued_s if stats is not None else 0.0,
        prefill_s=stats.compute_s if stats is not None else 0.0,
        first_token_s=first_token_s,
        continuations=max(0, len(senders) - 1),
        reused_bytes=received.reused_bytes if received is not None else 0,
    )


def _encode_tokens(events: list[TokenEvent]) -> bytes:
    return b"".join(encode_event(_tokens_event(event)) for event in events)


def _tokens_event(event: TokenEvent) -> TokensEvent:
    logprobs = None
    if event.logprobs is not None:
        logprobs = [
            (
                LogprobMessage(chosen.token_id, chosen.logprob, chosen.text_bytes),
                [LogprobMessage(o.token_id, o.logprob, o.text_bytes) for o in others],
            )
            for chosen, others in event.logprobs
        ]
    return TokensEvent(
        index=event.index,
        token_ids=list(event.token_ids),
        text=event.text,
        finish_reason=event.finish_reason,
        stop_reason=event.stop_reason,
        logprobs=logprobs,
    )
