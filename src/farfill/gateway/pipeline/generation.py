"""One running generation: its decode stream, its far prefill, and what has been seen of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from farfill.clock import Clock
from farfill.core.cluster import FallbackReason, Placement
from farfill.core.errors import FarfillError, InvalidRequestError, ProtocolError
from farfill.gateway.fallback import FallbackGate
from farfill.gateway.loads import Claim
from farfill.gateway.lost import Wait
from farfill.gateway.observe import GatewayObserver
from farfill.gateway.pipeline.job import Job
from farfill.gateway.pipeline.prefill_leg import PrefillLeg
from farfill.gateway.workers import DecodeStream, WorkerConnectionError
from farfill.wire.control import EndEvent, FailedEvent, GenerationEvent, StartEvent, TokensEvent

DRAIN_S = 1.0
KEPT_TOKEN_IDS = 16
CACHED_WAIT_S = 0.25
"""Longest wait at the end of a remote generation for the far side's count of cached tokens."""


@dataclass(slots=True)
class Timing:
    """When tokens came. `first_s` is moved to when the first one was sent to the client."""

    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    choice_0_tokens: int = 0

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (n - 1) of the first choice."""
        if self.first_s is None or self.last_s is None or self.choice_0_tokens < 2:
            return None
        return max(0.0, self.last_s - self.first_s) / (self.choice_0_tokens - 1)


@dataclass(slots=True, kw_only=True)
class Generation:
    """Started: `start` is known and `first` holds at least one token. Call `close` exactly when done with it."""

    job: Job
    placement: Placement
    transfer_id: str
    fallback: FallbackReason
    fallback_detail: str
    start: StartEvent
    first: list[GenerationEvent]
    stream: DecodeStream
    leg: PrefillLeg | None
    claim: Claim
    wait: Wait
    clock: Clock
    observer: GatewayObserver
    gaps: FallbackGate
    timing: Timing = field(default_factory=Timing)
    finish_reasons: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    """The first choice's first ones."""
    ended: bool = False

    @property
    def remote(self) -> bool:
        """Whether the prompt really was prefilled far away."""
        return self.start.prefilled_at == "remote"

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length: counted here, or by the worker that got it as text."""
        prompt = self.job.prompt
        return prompt.length if prompt.counted else self.start.prompt_tokens

    async def next_batch(self) -> list[TokensEvent]:
        """New output, at least one event; empty when all choices finished.

        Raises FarfillError when the worker failed or the stream was cut short of its end.
        """
        if self.first:
            events, self.first = self.first, []
            return self._take(events)
        while not self.ended:
            self.wait.silent_since_s = self.clock.now_s()
            events = await self._events()
            self.wait.silent_since_s = None  # the client may be slow to take them
            if not events:
                raise self._cut()
            batch = self._take(events)
            if batch:
                return batch
        return []

    async def flow(self, take: Callable[[list[TokensEvent]], bool]) -> None:
        """Hand new output to `take`, at least one event a call, right where it is read.

        Returns when `take` wants no more for now, or when all choices finished (`ended`). Raises as `next_batch` does,
        and what `take` raises.
        """
        if self.first:
            events, self.first = self.first, []
            if not take(self._take(events)):
                return
        if self.ended:
            return
        wait, timing = self.wait, self.timing

        def came(events: list[GenerationEvent]) -> bool:
            if len(events) == 1 and type(events[0]) is TokensEvent:  # mostly
                batch = cast(list[TokensEvent], events)
                self._seen(batch)
                wait.silent_since_s = timing.last_s
                return take(batch)
            batch = self._take(events)
            more = not batch or take(batch)
            wait.silent_since_s = timing.last_s
            return more and not self.ended

        wait.silent_since_s = self.clock.now_s()
        try:
            reached_end = not await self.stream.flow(came)
        except WorkerConnectionError as error:
            if wait.lost:
                raise wait.error() from error
            raise
        finally:
            wait.silent_since_s = None  # the client may be slow to take them
        if reached_end:
            raise self._cut()

    def sent(self) -> None:
        """The first token was just sent to the client."""
        if self.timing.first_s is not None:
            self.timing.first_s = self.clock.now_s()

    async def cached_tokens(self) -> int:
        """Prompt tokens nobody had to compute: decode's hit, or the far side's when that prefilled."""
        cached = self.start.cached_tokens
        if self.remote and self.leg is not None and await self.leg.wait(CACHED_WAIT_S):
            cached = max(cached, self.leg.report.cached_tokens if self.leg.report is not None else 0)
        return min(cached, self.prompt_tokens)

    async def finish(self) -> None:
        """All output was taken: read to the end of the body, so that the connection can serve again."""
        await self.stream.drain(DRAIN_S)

    def close(self) -> None:
        """Let go of decode; a generation that is not at its end is withdrawn on both sides. Idempotent."""
        self.stream.close()
        if not self.ended and self.leg is not None:
            self.leg.cancel()
        self.claim.end()
        self.wait.end()

    def _cut(self) -> WorkerConnectionError:
        return WorkerConnectionError(f"{self.placement.decode.name}: stream was cut", reached=True)

    async def _events(self) -> list[GenerationEvent]:
        try:
            return await self.stream.next_batch()
        except WorkerConnectionError as error:
            if self.wait.lost:
                raise self.wait.error() from error
            raise

    def _take(self, events: list[GenerationEvent]) -> list[TokensEvent]:
        batch: list[TokensEvent] = []
        for event in events:
            if isinstance(event, TokensEvent):
                batch.append(event)
            elif isinstance(event, FailedEvent):
                raise failed(event)
            elif isinstance(event, EndEvent):
                self._seen(batch)
                if len(self.finish_reasons) != self.job.sampling.n:
                    raise ProtocolError(f"{self.placement.decode.name}: ended with unfinished choices")
                self.ended = True
                return batch
            else:
                raise ProtocolError(f"{self.placement.decode.name}: a second start event")
        self._seen(batch)
        return batch

    def _seen(self, batch: list[TokensEvent]) -> None:
        if not batch:
            return
        now_s, timing = self.clock.now_s(), self.timing
        if timing.last_s is None:
            timing.first_s = now_s
        else:
            gap_s = now_s - timing.last_s
            self.observer.token_gap(self.placement.decode.model, gap_s)
            if self.gaps.guarded:
                self.gaps.token_gap(gap_s, now_s)
        timing.last_s = now_s
        for event in batch:
            tokens = len(event.token_ids)
            timing.tokens += tokens
            if event.index == 0:
                timing.choice_0_tokens += tokens
                if timing.choice_0_tokens - tokens < KEPT_TOKEN_IDS:
                    self.token_ids += event.token_ids[: KEPT_TOKEN_IDS - len(self.token_ids)]
            if event.finish_reason is not None:
                self.finish_reasons.append(event.finish_reason)


# A grammar over its bounds; constraints that together allow nothing.
_OF_THE_REQUEST = frozenset({"grammar_limit", "no_token_allowed"})


def failed(event: FailedEvent) -> FarfillError:
    """What a worker's failure is to the client of the API; some are of what the client asked for."""
    if event.reason in _OF_THE_REQUEST:
        return InvalidRequestError(event.message, reason=event.reason)
    return FarfillError(event.message, reason=event.reason)
