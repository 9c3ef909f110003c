"""How many instances died while they worked on one request: a prompt that kills engines must not go through them all.

A lost connection alone proves nothing: the link may be cut. An instance counts as dead when its engine says so, or
when its connection broke and nothing listens at its address any more. A restarted one counts again.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import structlog

from farfill.core.cluster import Instance
from farfill.core.errors import FarfillError
from farfill.gateway.errors import PoisonousRequestError
from farfill.gateway.observe import GatewayObserver
from farfill.gateway.workers import WorkerAnswerError, WorkerClient, WorkerConnectionError

log = structlog.get_logger("farfill.gateway")

KNOCK_S = 1.0
ENGINE_DEAD = frozenset({"engine_dead"})


@dataclass(slots=True)
class Deaths:
    """Of one prompt. `limit` instances may die of it."""

    limit: int = 2
    died: list[str] = field(default_factory=list[str])

    @property
    def over(self) -> bool:
        """Whether nobody else may try."""
        return len(self.died) >= self.limit

    def error(self) -> PoisonousRequestError:
        """What the client hears."""
        return PoisonousRequestError(
            f"{len(self.died)} instances died while working on this request ({', '.join(self.died)}); it is not tried "
            "again (routing.max_deaths_per_request)"
        )

    async def note(
        self, request_id: str, instance: Instance, error: FarfillError, client: WorkerClient, observer: GatewayObserver
    ) -> None:
        """`error` ended the work of `instance`; look whether it died."""
        if not await has_died(instance, error, client):
            return
        self.died.append(instance.name)
        observer.instance_died(instance, over=self.over)
        log.error(
            "instance_died_of_request",
            request_id=request_id,
            instance=instance.name,
            generation=instance.generation,
            reason=error.reason,
            deaths=len(self.died),
            limit=self.limit,
        )


async def has_died(instance: Instance, error: FarfillError, client: WorkerClient) -> bool:
    """Whether `instance` died rather than just could not be heard any more."""
    if isinstance(error, WorkerAnswerError):
        return error.reason in ENGINE_DEAD
    if not isinstance(error, WorkerConnectionError) or not error.reached:
        return False
    # A whole handshake: the kernel takes connections for a process that is just dying.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KNOCK_S):
            return await client.gone(instance)
    return False
