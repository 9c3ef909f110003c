"""The decode side of a request: await the prompt's KV or prefill here, then stream tokens.

The HTTP status goes out with the first token, so a request that cannot be served is never a 200.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import structlog
from aiohttp import web

from farfill.core.cluster import FallbackReason
from farfill.core.errors import CapacityError, FarfillError, InvalidRequestError, UnavailableError
from farfill.core.sampling import SamplingParams
from farfill.engine.protocol import Engine, GenerateWork, KVSlot, PrefillStats, TokenEvent
from farfill.telemetry.metrics import WorkerMetrics
from farfill.transfer.protocol import ExpectedTransfer, ReceiveResult, TransferReceiver
from farfill.transfer.tickets import TicketVerifier
from farfill.wire.control import (
    CONTENT_TYPE,
    DecodeCommand,
    EndEvent,
    FailedEvent,
    FailTransferCommand,
    LogprobMessage,
    SamplingMessage,
    StartEvent,
    TokensEvent,
)
from farfill.wire.events import encode_event
from farfill.worker.http import message_response, read_message
from farfill.worker.pending import PendingTransfers
from farfill.worker.sinks import TokenQueue

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKV:
    """Where a prompt's KV came from: the slot to start from, and what waiting for it cost."""

    slot: KVSlot | None = None
    valid_tokens: int = 0
    held_tokens: int = 0
    received: ReceiveResult | None = None
    fallback: FallbackReason = FallbackReason.NONE
    detail: str = ""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeService:
    """POST /v1/decode and POST /v1/transfers/{id}/fail. A closed connection frees everything at once."""

    name: str
    engine: Engine
    receiver: TransferReceiver
    verifier: TicketVerifier
    metrics: WorkerMetrics
    pending: PendingTransfers = field(default_factory=PendingTransfers)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Streams `StartEvent`, `TokensEvent`s, then `EndEvent` or `FailedEvent`."""
        started_s = asyncio.get_running_loop().time()
        command = await read_message(request, DecodeCommand)
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

    def _checked_work(self, command: DecodeCommand) -> GenerateWork:
        info = self.engine.info
        sampling = _sampling(command.sampling)
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
        return GenerateWork(
            request_id=command.request_id,
            prompt=tuple(command.token_ids),
            cache_salt=command.cache_salt,
            sampling=sampling,
        )

    async def _serve(
        self, request: web.Request, command: DecodeCommand, work: GenerateWork, started_s: float
    ) -> tuple[web.StreamResponse, str]:
        loop = asyncio.get_running_loop()
        prompt = await self._await_kv(command, work, started_s)
        queue = TokenQueue(loop)
        try:
            running = self.engine.generate(work, queue, slot=prompt.slot, valid_tokens=prompt.valid_tokens)
        except FarfillError:
            if prompt.slot is not None:
                prompt.slot.release()
            raise
        try:
            first = await queue.next_events()
            start = _start_event(command, prompt, queue.stats, loop.time() - started_s)
            response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
            await response.prepare(request)
            await response.write(encode_event(start) + _encode_tokens(first))
            return response, await self._stream(response, queue, first, work.sampling.n)
        finally:
            running.cancel()

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
            slot = self.engine.reserve(work)
        except CapacityError as error:
            return self._fallen_back(
                command, PromptKV(fallback=FallbackReason.KV_MEMORY, detail=str(error)), ticket.transfer_id
            )
        try:
            expected = self.receiver.expect(ticket, slot, timeout_s=command.timeout_s, source=command.source)
            with self.pending.waiting(ticket.transfer_id, expected):
                result = await _wait_fenced(expected)
        except BaseException:
            slot.release()
            raise
        prompt = PromptKV(
            slot=slot,
            valid_tokens=result.prefix_tokens,
            held_tokens=slot.manifest.complete_prefix_tokens(slot.held),
            received=result,
            fallback=FallbackReason.NONE if result.complete else result.failure,
            detail=result.detail,
            wait_s=asyncio.get_running_loop().time() - started_s,
        )
        stats = result.stats
        outcome = "ok" if result.complete else "failed"
        self.metrics.transfer_finished(outcome, str(prompt.fallback), stats.total_s, stats.raw_bytes, stats.wire_bytes)
        return prompt if result.complete else self._fallen_back(command, prompt, ticket.transfer_id)

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


async def _wait_fenced(expected: ExpectedTransfer) -> ReceiveResult:
    """Wait for the transfer; when cancelled, fence it first, so that the slot may be released."""
    waiting = asyncio.ensure_future(expected.wait())
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        expected.fail(FallbackReason.WITHDRAWN, "the client went away")
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
    return SamplingParams(**fields)


def _start_event(
    command: DecodeCommand, prompt: PromptKV, stats: PrefillStats | None, first_token_s: float
) -> StartEvent:
    received = prompt.received
    remote = received is not None and received.complete
    if remote:
        cached_tokens = 0  # what far prefill could skip is in its own report
    elif prompt.slot is not None:
        cached_tokens = min(prompt.held_tokens, prompt.valid_tokens)
    else:
        cached_tokens = stats.cached_tokens if stats is not None else 0
    return StartEvent(
        prefilled_at="remote" if remote else "local",
        fallback=str(prompt.fallback),
        fallback_detail=prompt.detail if prompt.fallback is not FallbackReason.NONE else "",
        prompt_tokens=len(command.token_ids),
        cached_tokens=cached_tokens,
        received_tokens=max(0, prompt.valid_tokens - prompt.held_tokens),
        computed_tokens=stats.computed_tokens if stats is not None else 0,
        kv_wait_s=prompt.wait_s,
        transfer_s=received.stats.total_s if received is not None else 0.0,
        raw_bytes=received.stats.raw_bytes if received is not None else 0,
        wire_bytes=received.stats.wire_bytes if received is not None else 0,
        queued_s=stats.queued_s if stats is not None else 0.0,
        prefill_s=stats.compute_s if stats is not None else 0.0,
        first_token_s=first_token_s,
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
