"""The far prefill of one request, from the gateway's side: it runs beside decode and is never waited for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from farfill.clock import Clock
from farfill.core.cluster import FallbackReason, Instance
from farfill.core.errors import FarfillError
from farfill.gateway.health import PrefillHealth, Trial
from farfill.gateway.loads import Claim
from farfill.gateway.observe import GatewayObserver
from farfill.gateway.records import LegError
from farfill.gateway.workers import WorkerAnswerError, WorkerClient, WorkerConnectionError
from farfill.policy.breaker import Outcome
from farfill.wire.control import PrefillCommand, PrefillReport

log = structlog.get_logger("farfill.gateway")

# Faults of decode or of nobody: they say nothing about the far side.
_NEUTRAL = frozenset({FallbackReason.NONE, FallbackReason.KV_MEMORY})
_BY_REASON = {
    **{str(reason): reason for reason in FallbackReason if reason is not FallbackReason.NONE},
    "incompatible_peer": FallbackReason.FINGERPRINT_MISMATCH,
    "protocol_version": FallbackReason.PROTOCOL,
    "protocol_violation": FallbackReason.PROTOCOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LegContext:
    """What every leg needs."""

    client: WorkerClient
    health: PrefillHealth
    observer: GatewayObserver
    clock: Clock
    notify_timeout_s: float


class PrefillLeg:
    """Starts at once. Ends by itself, by `give_up` (decode stopped waiting) or by `cancel` (nobody wants it)."""

    def __init__(
        self,
        ctx: LegContext,
        prefill: Instance,
        decode: Instance,
        transfer_id: str,
        command: PrefillCommand,
        *,
        trial: Trial,
        claim: Claim,
    ) -> None:
        self._ctx = ctx
        self._prefill = prefill
        self._decode = decode
        self._transfer_id = transfer_id
        self._trial = trial
        self._claim = claim
        self._given_up = FallbackReason.NONE
        self._began_s = ctx.clock.now_s()
        self.report: PrefillReport | None = None
        self.error: LegError | None = None
        self.seconds: float | None = None
        self._task = asyncio.create_task(self._run(command), name=f"prefill-leg-{transfer_id}")

    def give_up(self, reason: FallbackReason) -> None:
        """Decode fell back because of `reason`: what the far side still does is wasted."""
        self._given_up = reason
        self._task.cancel()

    def cancel(self) -> None:
        """Withdraw it; nobody is to blame. Idempotent."""
        self._task.cancel()

    async def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`. Never raises for the leg's own failure."""
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        return bool(done)

    async def _run(self, command: PrefillCommand) -> None:
        failure = FallbackReason.NONE
        outcome = Outcome.NEUTRAL
        label = "cancelled"
        try:
            self.report = await self._ctx.client.prefill(self._prefill, command)
            outcome, label = Outcome.SUCCESS, "ok"
        except asyncio.CancelledError:
            if self._given_up not in _NEUTRAL:
                outcome, label = Outcome.FAILURE, str(self._given_up)
            if self._given_up is not FallbackReason.NONE:
                self.error = LegError(reason=str(self._given_up), message="decode stopped waiting")
            raise
        except FarfillError as error:
            failure, outcome = fallback_reason(error), breaker_outcome(error)
            label = str(failure)
            self.error = LegError(reason=error.reason, message=str(error))
        finally:
            self._end(outcome, label)
        if failure is not FallbackReason.NONE:
            await self._tell_decode(failure)

    def _end(self, outcome: Outcome, label: str) -> None:
        self.seconds = self._ctx.clock.now_s() - self._began_s
        self._claim.end()
        self._ctx.health.end(self._trial, outcome)
        wire_bytes = self.report.wire_bytes if self.report is not None else 0
        self._ctx.observer.prefill_leg_ended(self._prefill, label, self.seconds, wire_bytes)

    async def _tell_decode(self, reason: FallbackReason) -> None:
        detail = self.error.message if self.error is not None else ""
        log.warning(
            "prefill_leg_failed",
            transfer_id=self._transfer_id,
            prefill=self._prefill.name,
            decode=self._decode.name,
            reason=str(reason),
            detail=detail,
        )
        try:
            async with asyncio.timeout(self._ctx.notify_timeout_s):
                await self._ctx.client.fail_transfer(self._decode, self._transfer_id, reason, detail)
        except (FarfillError, TimeoutError) as error:
            # Decode still has its own limit on silence.
            log.warning("transfer_failure_not_told", transfer_id=self._transfer_id, error=str(error))


def fallback_reason(error: FarfillError) -> FallbackReason:
    """The label of a failed leg."""
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
    """Refusals for the request's sake and lack of room say nothing about the instance's health."""
    if isinstance(error, WorkerAnswerError) and (error.status < 500 or _no_room(error)):
        return Outcome.NEUTRAL
    return Outcome.FAILURE


def _no_room(error: WorkerAnswerError) -> bool:
    return error.status == 503 and error.body.retry_after_s > 0
