"""The account of one API request: its records, its summary for metrics, and its one log line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import structlog

from farfill.core.cluster import FallbackReason, PlacementReason, Role
from farfill.core.errors import CapacityError, FarfillError
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.errors import http_status
from farfill.gateway.observe import OutcomeName, RequestSummary
from farfill.gateway.pipeline.dispatch import TellPlaced
from farfill.gateway.pipeline.generation import Generation
from farfill.gateway.pipeline.job import Job
from farfill.gateway.pipeline.place import NotPlaced, Placed
from farfill.gateway.records import LegError, RequestRecord, TryRecord
from farfill.gateway.rollout import NO_FAULT
from farfill.gateway.service import GatewayService

log = structlog.get_logger("farfill.gateway")

Endpoint = Literal["chat", "completions"]


class _Stage:
    """A step while it runs: its seconds add up in `stages_s`."""

    __slots__ = ("_began_s", "_name", "_now_s", "_stages_s")

    def __init__(self, name: str, began_s: float, now_s: Callable[[], float], stages_s: dict[str, float]) -> None:
        self._name = name
        self._began_s = began_s
        self._now_s = now_s
        self._stages_s = stages_s

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        stages_s, name = self._stages_s, self._name
        stages_s[name] = stages_s.get(name, 0.0) + self._now_s() - self._began_s


class RequestTracker:
    """Created when a request is accepted; `finish` is called exactly once, however it ends."""

    def __init__(self, service: GatewayService, endpoint: Endpoint, request_id: str) -> None:
        self._service = service
        self._now_s = service.deps.clock.now_s
        self._endpoint: Endpoint = endpoint
        self.request_id = request_id
        self.accepted_s = self._now_s()
        self.accepted_unix_s = service.deps.clock.unix_s()
        self.model = "other"
        self.stream = False
        self.tenant = ""
        self._stages_s: dict[str, float] = {}
        self._stages_at_s: dict[str, float] = {}
        self._records: list[RequestRecord] = []
        self._generations: list[Generation] = []
        self._trails: list[tuple[RequestRecord, DecisionTrail]] = []
        service.deps.observer.request_accepted()

    def of_model(self, service: GatewayService) -> None:
        """The request is for this model, whose view of the gateway `service` is."""
        self._service, self.model = service, service.deps.config.model.name

    def stage(self, name: str) -> _Stage:
        """Count the seconds of one pipeline step, which begins now."""
        began_s = self._now_s()
        if name not in self._stages_at_s:
            self._stages_at_s[name] = began_s - self.accepted_s
        return _Stage(name, began_s, self._now_s, self._stages_s)

    def prompts(self, lengths: list[int]) -> None:
        """The request has these prompts."""
        for i, length in enumerate(lengths):
            record = RequestRecord(
                request_id=self.request_id if i == 0 else f"{self.request_id}-{i}",
                endpoint=self._endpoint,
                model=self.model,
                accepted_unix_s=self.accepted_unix_s,
                stream=self.stream,
                tenant=self.tenant,
                prompt_tokens=length,
                stages_s=self._stages_s,
                stages_at_s=self._stages_at_s,
            )
            self._records.append(record)
            self._service.records.begin(record)

    def placed(self, i: int) -> TellPlaced:
        """What to tell of prompt `i`'s placement."""
        record = self._records[i]

        def told(found: Placed | NotPlaced) -> None:
            self._trails.append((record, found.trail))
            record.decisions = [*record.decisions, *found.trail.decisions]
            if isinstance(found, NotPlaced):
                return
            placement, prefill = found.placement, found.placement.prefill
            record.placed = "remote" if placement.remote else "local"
            record.reason = str(placement.reason)
            record.decode_instance, record.decode_site = placement.decode.name, placement.decode.site
            record.prefill_instance = prefill.name if prefill is not None else ""
            record.prefill_site = prefill.site if prefill is not None else ""
            record.expected_hit_tokens, record.expected_far_hit_tokens = found.hit_tokens, found.far_hit_tokens
            record.uncached_tokens = placement.uncached_tokens
            record.threshold_tokens = placement.threshold_tokens
            record.tries.append(
                TryRecord(
                    at_s=self._now_s() - self.accepted_s - found.took_s,
                    took_s=found.took_s,
                    decode_instance=placement.decode.name,
                    prefill_instance=record.prefill_instance,
                    reason=record.reason,
                    decode_version=placement.decode.version,
                    prefill_version=prefill.version if prefill is not None else "",
                )
            )

        return told

    def started(self, generations: list[Generation]) -> None:
        """All prompts have their first token."""
        self._generations = generations

    def finish(self, error: FarfillError | None, *, cancelled: bool = False) -> None:
        """The request ended: tell the observer, log, and publish each record once its far leg ended too."""
        duration_s = self._now_s() - self.accepted_s
        outcome = "cancelled" if cancelled else _outcome(error)
        for record, _ in self._trails:
            record.decisions = []  # more was decided since it was placed
        for record, trail in self._trails:
            record.decisions = [*record.decisions, *trail.decisions]
            if self._service.decision_log is not None:
                self._service.decision_log.add(trail.decisions)
        for i, record in enumerate(self._records):
            generation = self._generations[i] if self._generations else None
            record.outcome = outcome
            record.duration_s = duration_s
            record.stages_s = dict(self._stages_s)
            record.error = LegError(reason=error.reason, message=str(error)) if error is not None else None
            if generation is not None:
                self._fill(record, generation)
            self._publish(record, generation)
        for record in self._records:
            if record.placed and not cancelled:
                self._service.rollout.finished(
                    record.model,
                    record.tenant,
                    record.reason,
                    FallbackReason(record.fallback),
                    placed_far=record.placed == "remote",
                    ttft_s=record.ttft_s,
                )
                self._count_versions(record)
        if error is None and not cancelled:
            for generation in self._generations:
                if self._service.parity.wants(generation):
                    comparing = self._service.parity.compare(generation.job, tuple(generation.token_ids))
                    self._service.background.spawn(comparing, f"parity-{generation.job.request_id}")
        summary = self._summary(error, outcome, duration_s)
        self._service.deps.observer.request_finished(summary)
        self._service.traffic.finished(summary)
        self._service.background.soon(partial(self._log, summary, error))

    def _count_versions(self, record: RequestRecord) -> None:
        """What the request says of the versions of the workers it was placed on."""
        rollout, last = self._service.rollout, len(record.tries) - 1
        for number, tried in enumerate(record.tries):
            failed = number < last or record.outcome == "error"
            rollout.served(Role.DECODE, tried.decode_version, failed=failed, ttft_s=record.ttft_s)
        if record.placed == "remote":
            failed = FallbackReason(record.fallback) not in NO_FAULT or bool(record.continuations)
            version = record.tries[last].prefill_version
            rollout.served(Role.PREFILL, version, failed=failed, ttft_s=record.ttft_s)

    def _fill(self, record: RequestRecord, generation: Generation) -> None:
        timing = generation.timing
        record.start = generation.start
        record.prompt_tokens = generation.prompt_tokens
        record.placement = "remote" if generation.remote else "local"
        record.fallback = str(generation.fallback)
        record.fallback_detail = generation.fallback_detail
        record.transfer_id = generation.transfer_id
        prefill = generation.placement.prefill
        if prefill is not None:
            record.prefill_instance, record.prefill_site = prefill.name, prefill.site
        if generation.leg is not None:
            record.continuations = generation.leg.continuations
        record.cached_tokens = min(generation.start.cached_tokens, record.prompt_tokens)
        record.completion_tokens = timing.tokens
        record.ttft_s = None if timing.first_s is None else timing.first_s - self.accepted_s
        record.tpot_s = timing.tpot_s
        record.finish_reasons = list(generation.finish_reasons)

    def _publish(self, record: RequestRecord, generation: Generation | None) -> None:
        leg, job = (None, None) if generation is None else (generation.leg, generation.job)
        if leg is None:
            self._keep(record, job)
            return

        async def when_leg_ended() -> None:
            if not await leg.wait(self._service.deps.config.kv_transfer.timeout_ms / 1000):
                # Decode has everything it will get; the far side just does not say so.
                leg.give_up(FallbackReason.PREFILL_LOST)
                await leg.wait(1.0)
            record.prefill, record.prefill_error, record.prefill_leg_s = leg.report, leg.error, leg.seconds
            if leg.report is not None and record.placement == "remote":
                cached = max(record.cached_tokens, leg.report.cached_tokens)
                record.cached_tokens = min(cached, record.prompt_tokens)
            self._keep(record, job)

        self._service.background.spawn(when_leg_ended(), f"record-{record.request_id}")

    def _keep(self, record: RequestRecord, job: Job | None) -> None:
        self._service.records.publish(record)
        if self._service.recording is not None:
            self._service.recording.ended(record, job)

    def _summary(self, error: FarfillError | None, outcome: OutcomeName, duration_s: float) -> RequestSummary:
        first = self._records[0] if self._records else None
        placement: Literal["local", "remote", "none"] = "none"
        if first is not None and first.placement:
            placement = "remote" if first.placement == "remote" else "local"
        ttfts = [r.ttft_s for r in self._records if r.ttft_s is not None]
        return RequestSummary(
            endpoint=self._endpoint,
            model=self.model,
            outcome=outcome,
            status=499 if outcome == "cancelled" else 200 if error is None else http_status(error),
            error_reason="" if error is None else error.reason,
            placement=placement,
            reason=PlacementReason(first.reason) if first is not None and first.reason else None,
            fallback=FallbackReason(first.fallback) if first is not None else FallbackReason.NONE,
            continued=tuple(step.reason for step in first.continuations) if first is not None else (),
            stream=self.stream,
            prompt_tokens=sum(r.prompt_tokens for r in self._records),
            cached_tokens=sum(r.cached_tokens for r in self._records),
            completion_tokens=sum(r.completion_tokens for r in self._records),
            ttft_s=max(ttfts, default=None),
            tpot_s=first.tpot_s if first is not None else None,
            duration_s=duration_s,
            stages_s=dict(self._stages_s),
        )

    def _log(self, summary: RequestSummary, error: FarfillError | None) -> None:
        first = self._records[0] if self._records else None
        log.info(
            "request",
            request_id=self.request_id,
            endpoint=summary.endpoint,
            model=summary.model,
            outcome=summary.outcome,
            status=summary.status,
            error_reason=summary.error_reason,
            error="" if error is None else str(error),
            stream=summary.stream,
            placement=summary.placement,
            placed=first.placed if first is not None else "",
            reason="" if summary.reason is None else str(summary.reason),
            fallback=str(summary.fallback),
            continued=list(summary.continued),
            decode=first.decode_instance if first is not None else "",
            prefill=first.prefill_instance if first is not None else "",
            transfer_id=first.transfer_id if first is not None else "",
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            completion_tokens=summary.completion_tokens,
            ttft_s=_rounded(summary.ttft_s),
            tpot_s=_rounded(summary.tpot_s),
            duration_s=_rounded(summary.duration_s),
        )


def _outcome(error: FarfillError | None) -> OutcomeName:
    if error is None:
        return "ok"
    if isinstance(error, CapacityError):
        return "rejected"
    return "client_error" if http_status(error) < 500 else "error"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
