"""One far prefill of one request: its ticket, its command, and how it ended as seen from both workers.

The prefill worker's answer is not enough: a sender that hangs says nothing at all, and only decode sees the silence. So
decode is asked, too, once a sender has been at it for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from farfill.clock import Clock
from farfill.config.model import ClusterConfig
from farfill.core.cluster import FallbackReason, Instance
from farfill.core.errors import FarfillError
from farfill.core.ticket import Ticket
from farfill.gateway.fallback import FallbackGate
from farfill.gateway.health import PrefillHealth
from farfill.gateway.links import LinkView
from farfill.gateway.loads import OutstandingWork
from farfill.gateway.observe import GatewayObserver, PolicyObserver
from farfill.gateway.pipeline.job import Job
from farfill.gateway.pipeline.place import Placer
from farfill.gateway.prefixes import PrefixView
from farfill.gateway.workers import WorkerAnswerError, WorkerClient, WorkerConnectionError
from farfill.policy.breaker import Outcome
from farfill.wire.control import PrefillCommand, PrefillReport

SignTicket = Callable[[Ticket], str]

STATUS_WAIT_S = 20.0
_BY_REASON = {
    **{str(reason): reason for reason in FallbackReason if reason is not FallbackReason.NONE},
    "incompatible_peer": FallbackReason.FINGERPRINT_MISMATCH,
    "protocol_version": FallbackReason.PROTOCOL,
    "protocol_violation": FallbackReason.PROTOCOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LegContext:
    """What every far prefill needs."""

    config: ClusterConfig
    client: WorkerClient
    placer: Placer
    health: PrefillHealth
    work: OutstandingWork
    links: LinkView
    prefixes: PrefixView
    fallback: FallbackGate
    sign_ticket: SignTicket
    observer: GatewayObserver
    policies: PolicyObserver
    clock: Clock

    @property
    def decode_dials(self) -> bool:
        """Who opens KV connections."""
        return self.config.kv_transfer.dial == "receiver"

    @property
    def silence_s(self) -> float:
        """How long anybody may be silent."""
        return self.config.kv_transfer.timeout_ms / 1000

    def source(self, prefill: Instance) -> str:
        """Where decode finds `prefill`, when it dials."""
        return prefill.transfer_address if self.decode_dials else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One prefill instance and its permission to push one transfer to one decode instance."""

    prefill: Instance
    decode: Instance
    transfer_id: str
    command: PrefillCommand
    uncached_tokens: int

    @property
    def token(self) -> str:
        """The signed ticket."""
        return self.command.ticket


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed: the label, the cause in words, and who said so."""

    label: FallbackReason
    reason: str
    detail: str
    breaker: Outcome
    retry_after_s: float = 1.0
    error: FarfillError | None = None


def make_attempt(
    ctx: LegContext, job: Job, decode: Instance, prefill: Instance, uncached_tokens: int, *, continues: bool = False
) -> Attempt:
    """A fresh transfer id and ticket; `continues`: for what another sender began. Nothing is sent yet."""
    now_s, transfer_id = ctx.clock.unix_s(), uuid.uuid4().hex
    ticket = Ticket(
        transfer_id=transfer_id,
        fingerprint=decode.fingerprint,
        tenant=job.tenant,
        prefill=prefill.name,
        decode=decode.name,
        num_tokens=len(job.prompt.ids) - 1,
        issued_unix_s=now_s,
        expires_unix_s=now_s + ctx.config.tickets.lifetime_s,
        # What decode is thought to have need not travel: better ask than send.
        continues=continues or uncached_tokens < job.prompt.length - 1,
    )
    command = PrefillCommand(
        request_id=job.request_id,
        ticket=ctx.sign_ticket(ticket),
        target="" if ctx.decode_dials else decode.transfer_address,
        token_ids=job.prompt.ids,
        cache_salt=job.salt,
        tenant=job.tenant,
        priority=job.priority,
        timeout_s=ctx.silence_s,
        traceparent=job.traceparent,
        media=list(job.media),
        position_offset=job.position_offset,
    )
    return Attempt(
        prefill=prefill, decode=decode, transfer_id=transfer_id, command=command, uncached_tokens=uncached_tokens
    )


async def run_attempt(ctx: LegContext, attempt: Attempt, *, watched: bool) -> PrefillReport | Failure:
    """Prefill there and push, until the transfer is complete or has failed; when cancelled, it is withdrawn.

    `watched`: decode is asked, too, whether it still listens to this sender.
    """
    call = _task(ctx.client.prefill(attempt.prefill, attempt.command), f"prefill-{attempt.transfer_id}")
    watch = _task(_orphaned(ctx, attempt) if watched else asyncio.sleep(0), f"watch-{attempt.transfer_id}")
    try:
        await asyncio.wait((call, watch), return_when=asyncio.FIRST_COMPLETED)
        seen = None if call.done() else watch.result()
        return await call if seen is None else seen
    except FarfillError as error:
        pause_s = error.body.retry_after_s if isinstance(error, WorkerAnswerError) else 0.0
        return Failure(failure_label(error), error.reason, str(error), breaker_outcome(error), pause_s or 1.0, error)
    finally:
        call.cancel()
        watch.cancel()
        await asyncio.gather(call, watch, return_exceptions=True)


async def _orphaned(ctx: LegContext, attempt: Attempt) -> Failure | None:
    """Decode's reason not to listen to this sender any more; None: it has all it needs, or does not say."""
    # Silence is found out by then at the earliest; an ordinary prefill needs no question.
    await asyncio.sleep(ctx.silence_s / 2)
    with contextlib.suppress(FarfillError):
        while True:
            status = await ctx.client.transfer_status(attempt.decode, attempt.transfer_id, STATUS_WAIT_S)
            if status.state == "orphaned":
                label = _BY_REASON.get(status.reason, FallbackReason.PREFILL_LOST)
                return Failure(label, status.reason, status.detail, Outcome.FAILURE)
            if status.state != "receiving":
                return None
    return None


def failure_label(error: FarfillError) -> FallbackReason:
    """The label of a failed far prefill."""
    if isinstance(error, WorkerConnectionError):
        return FallbackReason.PREFILL_LOST if error.reached else FallbackReason.PREFILL_UNREACHABLE
    if not isinstance(error, WorkerAnswerError):
        return FallbackReason.PROTOCOL
    named = _BY_REASON.get(error.reason)
    if named is None and error.reason.startswith("ticket"):
        named = FallbackReason.TICKET_INVALID
    if named is None:
        refused = error.status < 500 or _no_room(error)
        named = FallbackReason.PREFILL_REFUSED if refused else FallbackReason.PREFILL_FAILED
    return named


def breaker_outcome(error: FarfillError) -> Outcome:
    """Refusals for the request's sake say nothing about the instance's health; lack of room asks for a pause."""
    if not isinstance(error, WorkerAnswerError):
        return Outcome.FAILURE
    if error.status == 429 or _no_room(error):
        return Outcome.OVERLOAD
    return Outcome.NEUTRAL if error.status < 500 else Outcome.FAILURE


def _no_room(error: WorkerAnswerError) -> bool:
    return error.status == 503 and error.body.retry_after_s > 0


def _task(work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work, name=name)
