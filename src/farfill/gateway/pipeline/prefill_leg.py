"""The far prefill of one request, from the gateway's side: it runs beside decode and is never waited for.

When a prefill instance fails, another one continues the transfer: decode keeps what has arrived, the failed sender is
fenced there, and the next one, under a ticket of its own, brings only what is missing. When nobody is left, or it
failed too often, decode is told to prefill by itself.
"""

from __future__ import annotations

import asyncio
import random

import structlog

from farfill.core.cluster import FallbackReason, Instance
from farfill.core.errors import CapacityError, FarfillError
from farfill.gateway.fallback import FallbackGrant
from farfill.gateway.pipeline.attempt import Attempt, Failure, LegContext, make_attempt, run_attempt
from farfill.gateway.pipeline.job import Job
from farfill.gateway.pipeline.place import Placed
from farfill.gateway.records import ContinuationRecord, LegError
from farfill.policy.breaker import Outcome
from farfill.wire.control import ContinueCommand, PrefillReport

log = structlog.get_logger("farfill.gateway")

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
# Faults of decode or of nobody: they say nothing about the far side.
_NEUTRAL = frozenset(
    {FallbackReason.NONE, FallbackReason.KV_MEMORY, FallbackReason.KV_NOT_LOADED, FallbackReason.WITHDRAWN}
)
# The way there is at fault, more than who went it: another site has another one.
_OF_THE_WAY = frozenset({FallbackReason.PREFILL_UNREACHABLE, FallbackReason.LINK_LOST, FallbackReason.TRANSFER_TIMEOUT})


class PrefillLeg:
    """Starts at once. Ends by itself, by `give_up` (decode stopped waiting) or by `cancel` (nobody wants it)."""

    def __init__(self, ctx: LegContext, job: Job, attempt: Attempt, placed: Placed) -> None:
        self._ctx = ctx
        self._job = job
        self._attempt = attempt
        self._placed = placed
        self._tried = {(attempt.prefill.name, attempt.prefill.generation)}
        self._given_up = FallbackReason.NONE
        self._served = False
        self._began_s = ctx.clock.now_s()
        self.report: PrefillReport | None = None
        self.error: LegError | None = None
        self.seconds: float | None = None
        self.continuations: list[ContinuationRecord] = []
        self.grant: FallbackGrant | None = None
        """Decode's permission to prefill by itself, once it needs one."""
        self.refused: asyncio.Future[FarfillError] = asyncio.get_running_loop().create_future()
        """Set when the prompt may not be prefilled near either."""
        self._task = asyncio.create_task(self._run(), name=f"prefill-leg-{attempt.transfer_id}")

    @property
    def prefill(self) -> Instance:
        """Who prefills now, or did last."""
        return self._attempt.prefill

    @property
    def transfer_id(self) -> str:
        """The transfer under way, or the last one."""
        return self._attempt.transfer_id

    def served(self) -> None:
        """Decode has everything: nobody needs to continue any more."""
        self._served = True

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

    async def _run(self) -> None:
        try:
            while True:
                failure = await self._try(self._attempt)
                if failure is None or self._served or await self._kills(failure):
                    return
                if not await self._continue(failure):
                    if self._may_fall_back():
                        await self._tell_decode(failure)
                    return
        finally:
            self.seconds = self._ctx.clock.now_s() - self._began_s

    async def _kills(self, failure: Failure) -> bool:
        """Whether so many instances died of this prompt that nobody else may try it, near or far."""
        deaths = self._job.deaths
        if failure.error is not None:
            prefill, ctx = self._attempt.prefill, self._ctx
            await deaths.note(self._job.request_id, prefill, failure.error, ctx.client, ctx.observer)
        if deaths.over:
            self.refused.set_result(deaths.error())
        return deaths.over

    def _may_fall_back(self) -> bool:
        """Whether decode may prefill the prompt itself; if not, whoever waits for decode hears of it."""
        if self._ctx.config.routing.fallback_to_local_prefill:
            try:
                self.grant = self._ctx.fallback.ask(self._attempt.uncached_tokens, self._placed.trail)
            except CapacityError as error:
                self.refused.set_result(error)
                return False
        return True

    async def _try(self, attempt: Attempt) -> Failure | None:
        """One attempt, accounted for; None: the transfer is complete."""
        ctx, prefill = self._ctx, attempt.prefill
        waiting = max(prefill.queued_tokens, ctx.work.tokens(prefill))
        trial = ctx.health.begin(prefill, waiting + attempt.uncached_tokens)
        claim = ctx.work.begin(prefill, attempt.uncached_tokens, self._job.tenant)
        began_s = ctx.clock.now_s()
        outcome, label, pause_s = Outcome.NEUTRAL, "cancelled", 1.0
        try:
            ended = await run_attempt(ctx, attempt, watched=ctx.config.kv_transfer.continuations > 0)
            if isinstance(ended, PrefillReport):
                self.report, self.error = ended, None
                outcome, label = Outcome.SUCCESS, "ok"
                self._learn(prefill, ended)
                return None
            outcome, label, pause_s = ended.breaker, str(ended.label), ended.retry_after_s
            self.error = LegError(reason=ended.reason, message=ended.detail)
            return ended
        except asyncio.CancelledError:
            if self._given_up not in _NEUTRAL:
                outcome, label = Outcome.FAILURE, str(self._given_up)
            if self._given_up is not FallbackReason.NONE:
                self.error = LegError(reason=str(self._given_up), message="decode stopped waiting")
            raise
        finally:
            claim.end()
            ctx.health.end(trial, outcome, of_the_way=label in _OF_THE_WAY, retry_after_s=pause_s)
            wire_bytes = self.report.wire_bytes if self.report is not None else 0
            ctx.observer.prefill_leg_ended(prefill, label, ctx.clock.now_s() - began_s, wire_bytes)
            if self.continuations:
                self._continued(self.continuations[-1], label)

    def _learn(self, prefill: Instance, report: PrefillReport) -> None:
        """What a complete far prefill tells about its site, its link and its cache."""
        ctx, job = self._ctx, self._job
        ctx.links.far_ended(prefill, job.prompt.length, report)
        first = not self.continuations
        ctx.prefixes.computed(prefill.name, job.keys, report.cached_tokens if first else None)
        if first:
            ctx.policies.prefix_hit(
                self._placed.far_hit_tokens, report.cached_tokens, ctx.prefixes.source(prefill.name)
            )

    def _continued(self, record: ContinuationRecord, label: str) -> None:
        record.outcome = label
        outcome = label if label in ("ok", "cancelled") else "failed"
        self._ctx.observer.prefill_continued(record.reason, outcome)

    async def _continue(self, failure: Failure) -> bool:
        """Let another instance take over, if there is one in time and decode agrees."""
        ctx, failed = self._ctx, self._attempt
        limit = ctx.config.kv_transfer.continuations
        if not limit:
            return False
        prefill, obstacle = await self._next_instance(failure, limit)
        if prefill is None:
            ctx.observer.prefill_continued(str(failure.label), obstacle)
            return False
        attempt = make_attempt(ctx, self._job, failed.decode, prefill, failed.uncached_tokens, continues=True)
        command = ContinueCommand(
            ticket=attempt.token, source=ctx.source(prefill), reason=str(failure.label), detail=failure.detail[:500]
        )
        try:
            async with asyncio.timeout(ctx.silence_s):
                reply = await ctx.client.continue_transfer(failed.decode, failed.transfer_id, command)
        except (FarfillError, TimeoutError) as error:
            log.warning(
                "prefill_not_continued",
                request_id=self._job.request_id,
                transfer_id=failed.transfer_id,
                error=str(error),
            )
            ctx.observer.prefill_continued(str(failure.label), "refused")
            return False
        self._take_over(failure, failed, attempt, reply.held_bytes)
        return True

    async def _next_instance(self, failure: Failure, limit: int) -> tuple[Instance | None, str]:
        """Who takes over after a pause; else what is in the way."""
        if len(self.continuations) >= limit:
            return None, "exhausted"
        if self._another(failure) is None:  # then decode need not wait for the pause
            return None, "no_instance"
        if not await self._back_off():
            return None, "deadline"
        return self._another(failure), "no_instance"

    def _another(self, failure: Failure) -> Instance | None:
        failed = self._attempt
        avoid = failed.prefill.site if failure.label in _OF_THE_WAY else None
        return self._ctx.placer.another_prefill(failed.decode, self._tried, avoid, self._placed.trail)

    async def _back_off(self) -> bool:
        """Wait longer each time, by chance a little more or less; False: the request's deadline comes first."""
        ctx = self._ctx
        wait_s = min(BACKOFF_FIRST_S * 2 ** len(self.continuations), BACKOFF_MAX_S) * random.uniform(0.5, 1.5)  # noqa: S311
        deadline_s = self._job.accepted_s + ctx.config.gateway.request_timeout_s
        if ctx.clock.now_s() + wait_s >= deadline_s:
            return False
        await asyncio.sleep(wait_s)
        return True

    def _take_over(self, failure: Failure, failed: Attempt, attempt: Attempt, held_bytes: int) -> None:
        self._attempt = attempt
        self._tried.add((attempt.prefill.name, attempt.prefill.generation))
        self.continuations.append(
            ContinuationRecord(
                reason=str(failure.label),
                detail=failure.detail,
                transfer_id=failed.transfer_id,
                failed_instance=failed.prefill.name,
                failed_site=failed.prefill.site,
                prefill_instance=attempt.prefill.name,
                prefill_site=attempt.prefill.site,
                held_bytes=held_bytes,
            )
        )
        log.warning(
            "prefill_continued",
            request_id=self._job.request_id,
            transfer_id=attempt.transfer_id,
            reason=str(failure.label),
            detail=failure.detail,
            failed=failed.prefill.name,
            prefill=attempt.prefill.name,
            held_bytes=held_bytes,
        )

    async def _tell_decode(self, failure: Failure) -> None:
        ctx, attempt = self._ctx, self._attempt
        log.warning(
            "prefill_leg_failed",
            request_id=self._job.request_id,
            transfer_id=attempt.transfer_id,
            prefill=attempt.prefill.name,
            decode=attempt.decode.name,
            reason=str(failure.label),
            detail=failure.detail,
        )
        try:
            async with asyncio.timeout(ctx.silence_s):
                await ctx.client.fail_transfer(attempt.decode, attempt.transfer_id, failure.label, failure.detail)
        except (FarfillError, TimeoutError) as error:
            # Decode still has its own limit on silence.
            log.warning(
                "transfer_failure_not_told",
                request_id=self._job.request_id,
                transfer_id=attempt.transfer_id,
                error=str(error),
            )
