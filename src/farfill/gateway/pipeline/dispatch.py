"""Starts a generation: signs the ticket and calls decode and prefill at the same moment.

Until the first token, a decode instance that fails is replaced once, and one that refuses the ticket is asked
to prefill by itself. Every such turn has a reason label.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

import msgspec
import structlog

from farfill.clock import Clock
from farfill.config.model import ClusterConfig
from farfill.core.cluster import FallbackReason, Instance, Placement
from farfill.core.errors import CapacityError, FarfillError, ProtocolError, UnavailableError
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.health import DecodeReach
from farfill.gateway.loads import OutstandingWork
from farfill.gateway.lost import LostWatch
from farfill.gateway.observe import GatewayObserver
from farfill.gateway.pipeline.attempt import LegContext, make_attempt
from farfill.gateway.pipeline.deaths import Deaths
from farfill.gateway.pipeline.generation import Generation, failed
from farfill.gateway.pipeline.job import Job
from farfill.gateway.pipeline.place import NotPlaced, Placed, PlacementQuery, Placer
from farfill.gateway.pipeline.prefill_leg import PrefillLeg
from farfill.gateway.workers import DecodeStream, WorkerAnswerError, WorkerClient, WorkerConnectionError
from farfill.wire.control import (
    DecodeCommand,
    EndEvent,
    FailedEvent,
    GenerationEvent,
    SamplingMessage,
    StartEvent,
    TokensEvent,
)

log = structlog.get_logger("farfill.gateway")

_sampling_values = attrgetter(*SamplingMessage.__struct_fields__)

TellPlaced = Callable[[Placed | NotPlaced], None]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One try. `fallback` is set when the gateway itself already turned from far to local prefill."""

    placed: Placed
    placement: Placement
    fallback: FallbackReason = FallbackReason.NONE
    fallback_detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatcher:
    """Opens generations. Stateless beyond its collaborators."""

    config: ClusterConfig
    client: WorkerClient
    placer: Placer
    reach: DecodeReach
    work: OutstandingWork
    lost: LostWatch
    legs: LegContext
    clock: Clock
    observer: GatewayObserver

    async def open(self, job: Job, placed: TellPlaced) -> Generation:
        """Place and start `job`; returns with its first token. `placed` hears of every placement
        tried, and of one that could not be made.

        Raises FarfillError as the client should see it; nothing is left running then, or when cancelled.
        """
        job = msgspec.structs.replace(job, deaths=Deaths(self.config.routing.max_deaths_per_request))
        plan = self._plan(job, placed)
        try:
            return await self._attempt(job, plan)
        except FarfillError as error:
            await self._note_death(job, plan, error)
            second = self._second_plan(job, plan, error, placed)
            if second is None:
                raise _as_request_error(error) from error
            self.observer.decode_retried(plan.placement.decode, error.reason)
            log.warning(
                "decode_retried",
                request_id=job.request_id,
                decode=plan.placement.decode.name,
                reason=error.reason,
                error=str(error),
            )
        try:
            return await self._attempt(job, second)
        except FarfillError as error:
            await self._note_death(job, second, error)
            raise _as_request_error(error) from error

    async def _note_death(self, job: Job, plan: Plan, error: FarfillError) -> None:
        """Raises PoisonousRequestError when decode was one instance too many to die of this prompt."""
        await job.deaths.note(job.request_id, plan.placement.decode, error, self.client, self.observer)
        if job.deaths.over:
            raise job.deaths.error() from error

    def _plan(self, job: Job, placed: TellPlaced, exclude: tuple[str, ...] = ()) -> Plan:
        query = PlacementQuery(
            request_id=job.request_id,
            tenant=job.tenant,
            session=job.session,
            keys=job.keys,
            prompt_tokens=job.prompt.length,
            total_tokens=job.prompt.length + job.sampling.max_tokens,
            forced=job.forced,
        )
        trail = DecisionTrail(job.request_id, self.clock.unix_s())
        try:
            found = self.placer.place(query, exclude, trail)
        except FarfillError:
            placed(NotPlaced(trail))
            raise
        placed(found)
        return Plan(placed=found, placement=found.placement)

    def _second_plan(self, job: Job, plan: Plan, error: FarfillError, placed: TellPlaced) -> Plan | None:
        """What else may work after `error`, if anything."""
        if _ticket_refused(error) and plan.placement.remote and self.config.routing.fallback_to_local_prefill:
            return msgspec.structs.replace(
                plan,
                placement=replace(plan.placement, prefill=None),
                fallback=FallbackReason.TICKET_INVALID,
                fallback_detail=str(error),
            )
        lost = isinstance(error, WorkerConnectionError)
        refused = isinstance(error, WorkerAnswerError) and error.status >= 500 and error.body.retryable
        # A missing transfer is not decode's fault: another decode instance would wait just as long.
        if not lost and not (refused and isinstance(error, WorkerAnswerError) and error.body.side == "decode"):
            return None
        try:
            return self._plan(job, placed, exclude=(plan.placement.decode.name,))
        except UnavailableError:
            # Alone, but it was reached: an idle connection may have closed under our hands.
            return plan if isinstance(error, WorkerConnectionError) and error.reached else None

    async def _attempt(self, job: Job, plan: Plan) -> Generation:
        placement, prefill = plan.placement, plan.placement.prefill
        token, leg = "", None
        if prefill is not None:
            attempt = make_attempt(self.legs, job, placement.decode, prefill, placement.uncached_tokens)
            token, leg = attempt.token, PrefillLeg(self.legs, job, attempt, plan.placed)
        near_tokens = 0 if placement.remote else placement.uncached_tokens
        claim = self.work.begin(placement.decode, near_tokens, job.tenant)
        wait, stream = self.lost.begin(placement.decode), None
        try:
            async with wait:
                stream = await self._decode(placement.decode, self._decode_command(job, plan, token), leg)
                self.reach.tried(placement.decode, reached=True)
                start, first = await _first_tokens(stream, placement.decode)
        except BaseException as error:
            if isinstance(error, WorkerConnectionError | WorkerAnswerError):
                answered = isinstance(error, WorkerAnswerError) or error.reached
                self.reach.tried(placement.decode, reached=answered)
            if stream is not None:
                stream.close()
            if leg is not None:
                leg.cancel()
            claim.end()
            wait.end()
            _end_grants(plan, leg)
            raise
        claim.computed()
        wait.silent_since_s = None
        wait.on_lost(stream.close)
        fallback, detail = _fallback(plan, start)
        self._settle(job, plan, start, fallback, leg)
        return Generation(
            job=job,
            placement=placement if leg is None else replace(placement, prefill=leg.prefill),
            transfer_id="" if leg is None else leg.transfer_id,
            fallback=fallback,
            fallback_detail=detail,
            start=start,
            first=first,
            stream=stream,
            leg=leg,
            claim=claim,
            wait=wait,
            clock=self.clock,
            observer=self.observer,
            gaps=self.legs.fallback,
        )

    async def _decode(self, decode: Instance, command: DecodeCommand, leg: PrefillLeg | None) -> DecodeStream:
        """The stream, once decode committed to it; withdrawn when the prompt may be prefilled nowhere."""
        if leg is None:
            return await self.client.decode(decode, command)
        call = asyncio.create_task(self.client.decode(decode, command), name=f"decode-{command.request_id}")
        try:
            await asyncio.wait((call, leg.refused), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _withdraw(call)
            raise
        if call.done():
            return await call
        await _withdraw(call)
        raise leg.refused.result()

    def _settle(
        self, job: Job, plan: Plan, start: StartEvent, fallback: FallbackReason, leg: PrefillLeg | None
    ) -> None:
        """Act on what decode said of the prompt: end a leg it does not wait for, correct the prefix index."""
        local = start.prefilled_at != "remote"
        if leg is not None and local:
            leg.give_up(fallback)
        elif leg is not None:
            leg.served()
        legs, comparable = self.legs, local and fallback is FallbackReason.NONE
        legs.prefixes.computed(plan.placement.decode.name, job.keys, start.cached_tokens if comparable else None)
        if comparable:
            source = legs.prefixes.source(plan.placement.decode.name)
            legs.policies.prefix_hit(plan.placed.hit_tokens, start.cached_tokens, source)
        legs.links.near_ended(start)
        unasked = local and leg is not None and leg.grant is None and fallback is not FallbackReason.NONE
        if unasked:  # decode found out first that nothing came: it counts all the same
            with contextlib.suppress(CapacityError):
                legs.fallback.ask(start.computed_tokens, plan.placed.trail).end()
        _end_grants(plan, leg, start.computed_tokens)

    def _decode_command(self, job: Job, plan: Plan, token: str) -> DecodeCommand:
        prefill, prompt = plan.placement.prefill, job.prompt
        as_text = bool(prompt.text) and not prompt.counted and not token and plan.placement.decode.takes_text
        # Tuples are encoded as lists are.
        fields = dict(zip(SamplingMessage.__struct_fields__, _sampling_values(job.sampling), strict=True))
        return DecodeCommand(
            request_id=job.request_id,
            token_ids=[] if as_text else prompt.ids,
            text=prompt.text if as_text else "",
            add_special_tokens=as_text and prompt.add_special_tokens,
            cache_salt=job.salt,
            tenant=job.tenant,
            priority=job.priority,
            sampling=SamplingMessage(**fields),
            ticket=token,
            source="" if prefill is None else self.legs.source(prefill),
            timeout_s=self.legs.silence_s,
            hold_s=self.legs.silence_s if token and self.config.kv_transfer.continuations else 0.0,
            allow_fallback=self._may_fall_back(plan, token),
            traceparent=job.traceparent,
            media=list(job.media),
            position_offset=job.position_offset,
        )

    def _may_fall_back(self, plan: Plan, token: str) -> bool:
        """Whether decode may prefill by itself should it find out first that nothing comes."""
        if not self.config.routing.fallback_to_local_prefill:
            return False
        return not token or self.legs.fallback.open(plan.placement.uncached_tokens)


def _end_grants(plan: Plan, leg: PrefillLeg | None, computed_tokens: int = 0) -> None:
    for grant in (plan.placed.grant, None if leg is None else leg.grant):
        if grant is not None:
            grant.end(computed_tokens)


async def _withdraw(call: asyncio.Task[DecodeStream]) -> None:
    """End a call to decode, also one that was just answered."""
    call.cancel()
    await asyncio.wait([call])
    if not call.cancelled() and call.exception() is None:
        call.result().close()


async def _first_tokens(stream: DecodeStream, decode: Instance) -> tuple[StartEvent, list[GenerationEvent]]:
    """The start event, and what follows it up to at least the first token. Raises when it broke before."""
    start: StartEvent | None = None
    events: list[GenerationEvent] = []
    while start is None or not any(isinstance(event, TokensEvent) for event in events):
        batch = await stream.next_batch()
        if not batch:
            raise WorkerConnectionError(f"{decode.name}: stream was cut before its first token", reached=True)
        if start is None:
            head = batch.pop(0)
            if not isinstance(head, StartEvent):
                raise ProtocolError(f"{decode.name}: the stream does not begin with a start event")
            start = head
        events += batch
        for event in batch:
            if isinstance(event, FailedEvent):
                raise failed(event)
        if events and isinstance(events[-1], EndEvent) and len(events) == 1:
            raise ProtocolError(f"{decode.name}: ended without a token")
    return start, events


def _ticket_refused(error: FarfillError) -> bool:
    return isinstance(error, WorkerAnswerError) and error.status == 403 and error.reason.startswith("ticket")


def _fallback(plan: Plan, start: StartEvent) -> tuple[FallbackReason, str]:
    """Why the prompt was not prefilled as placed: the gateway's own reason first, else decode's."""
    if plan.fallback is not FallbackReason.NONE:
        return plan.fallback, plan.fallback_detail
    try:
        return FallbackReason(start.fallback), start.fallback_detail
    except ValueError:
        return FallbackReason.PROTOCOL, f"decode named an unknown fallback reason {start.fallback!r}"


def _as_request_error(error: FarfillError) -> FarfillError:
    return error.as_request_error() if isinstance(error, WorkerAnswerError) else error
