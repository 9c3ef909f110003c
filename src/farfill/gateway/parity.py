"""Parity sampling: a few prompts that were prefilled far are computed once more near, and must give the same tokens.

Only answers that are the same whenever they are computed (greedy, one choice), only their first tokens, only within
what the fallback budget has left, and under a salt of their own, so that nothing of the far run is reused.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import structlog

from farfill.core.errors import FarfillError
from farfill.gateway.fallback import FallbackGate
from farfill.gateway.observe import PolicyObserver
from farfill.gateway.pipeline.dispatch import Dispatcher
from farfill.gateway.pipeline.generation import Generation
from farfill.gateway.pipeline.job import Job
from farfill.gateway.rollout import RolloutState
from farfill.policy.offload import Forced

log = structlog.get_logger("farfill.gateway")

LOWEST_PRIORITY = 100
DEADLINE_S = 120.0


class Chance(Protocol):
    """Numbers from 0 to 1."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParitySampler:
    """`ratio` of the prompts that qualify are sampled."""

    ratio: float
    model: str
    dispatcher: Dispatcher
    rollout: RolloutState
    fallback: FallbackGate
    observer: PolicyObserver
    chance: Chance = random.random

    def wants(self, generation: Generation) -> bool:
        """Whether this finished generation is to be computed again."""
        sampling = generation.job.sampling
        return (
            self.ratio > 0
            and generation.remote
            and generation.ended
            and sampling.temperature == 0
            and sampling.n == 1
            and bool(generation.token_ids)
            and not generation.start.lossy
            and self.chance() < self.ratio
            and self.fallback.open(generation.job.prompt.length)
        )

    async def compare(self, job: Job, far: Sequence[int]) -> None:
        """Compute `job` near; `far` are the first tokens of the far run."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                near = await self._near(job, len(far))
        except (FarfillError, TimeoutError) as error:
            reason = error.reason if isinstance(error, FarfillError) else "timeout"
            self.observer.parity_sampled("failed")
            log.warning("parity_sample_failed", request_id=job.request_id, reason=reason, error=str(error))
            return
        equal = near == list(far)
        self.rollout.parity(self.model, job.tenant, equal=equal)
        self.observer.parity_sampled("equal" if equal else "differs")
        if not equal:
            log.error("parity_differs", request_id=job.request_id, far=list(far), near=near)

    async def _near(self, job: Job, tokens: int) -> list[int]:
        again = msgspec.structs.replace(
            job,
            request_id=f"{job.request_id}-parity",
            keys=(),
            salt=f"{job.salt}:parity-{secrets.token_hex(8)}",
            forced=Forced.LOCAL,
            priority=LOWEST_PRIORITY,
            sampling=replace(job.sampling, max_tokens=tokens, min_tokens=min(job.sampling.min_tokens, tokens)),
        )
        generation = await self.dispatcher.open(again, lambda _: None)
        try:
            while await generation.next_batch():
                pass
            await generation.finish()
        finally:
            generation.close()
        return generation.token_ids[:tokens]
