"""Decode instances that are gone without a word: whoever waits for one ends, long before the request's deadline.

A process that is killed resets its connections. A host without power, a link that swallows everything and a process
that stands still do not: only the registry notices, once their lease has run out. So what waits for an instance ends
when that is no longer listed and has said nothing meanwhile. While the registry itself is away nobody leaves its list,
and an instance that has only lost the registry goes on talking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import structlog

from farfill.clock import Clock
from farfill.core.cluster import Instance
from farfill.gateway.pipeline.place import Membership
from farfill.gateway.workers import WorkerConnectionError

log = structlog.get_logger("farfill.gateway")

GRACE_LEASES = 0.5
"""For how long an instance must be missing: it may come back after a hiccup."""


class LostWatch:
    """All waits for decode instances. Owned by the event loop; runs between `start` and `close`."""

    def __init__(self, membership: Membership, lease_s: float, clock: Clock) -> None:
        self._membership = membership
        self._grace_s = GRACE_LEASES * lease_s
        self._period_s = self._grace_s / 2
        self._clock = clock
        self._waits: set[Wait] = set()
        self._missing_since_s: dict[tuple[str, str], float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="lost-instances")

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def begin(self, instance: Instance) -> Wait:
        """A request depends on `instance` from now until the wait is `end`ed."""
        wait = Wait(instance, self._waits, self._clock)
        self._waits.add(wait)
        return wait

    def look(self) -> None:
        """End the waits for whoever is gone."""
        now_s = self._clock.now_s()
        listed = {(i.name, i.generation) for i in self._membership.instances()}
        missing = {wait.key for wait in self._waits} - listed
        self._missing_since_s = {key: self._missing_since_s.get(key, now_s) for key in missing}
        for wait in tuple(self._waits):
            since_s = self._missing_since_s.get(wait.key, now_s)
            if wait.silent_since_s is not None and now_s - max(since_s, wait.silent_since_s) >= self._grace_s:
                wait.give_up()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            if self._waits:
                self.look()


def _nothing() -> None:
    pass


class Wait:
    """One request's wait. `silent_since_s`: since when nothing has come; None while nothing is waited for."""

    def __init__(self, instance: Instance, waits: set[Wait], clock: Clock) -> None:
        self.key = instance.name, instance.generation
        self.silent_since_s: float | None = clock.now_s()
        self.lost = False
        self._waits = waits
        self._on_lost: Callable[[], object] = _nothing
        self._limit: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        """`async with` it: raises WorkerConnectionError out of the block when the instance is lost."""
        self._limit = asyncio.timeout(None)
        await self._limit.__aenter__()
        self.on_lost(self._interrupt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_lost(_nothing)
        limit, self._limit = self._limit, None
        assert limit is not None, "entered"
        try:
            await limit.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self.error() from late
        if isinstance(error, TimeoutError) and self.lost:
            raise self.error() from error

    def _interrupt(self) -> None:
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def on_lost(self, call: Callable[[], object]) -> None:
        """What to do, once, when it is lost."""
        self._on_lost = call

    def give_up(self) -> None:
        """The instance is lost."""
        log.warning("worker_lost_silently", instance=self.key[0], generation=self.key[1])
        self.lost = True
        self.end()
        self._on_lost()

    def error(self) -> WorkerConnectionError:
        """What that means for the request."""
        return WorkerConnectionError(f"{self.key[0]}: silent, and no longer registered", reached=True)

    def end(self) -> None:
        """Nothing depends on it any more. Idempotent."""
        self._waits.discard(self)
