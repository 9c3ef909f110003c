"""A simulated prefill instance: one prompt after the other, as they came; faster each while others wait (batches)."""

from __future__ import annotations

from collections import deque

from farfill.core.cluster import Instance, InstanceState
from farfill.policy.breaker import CircuitBreaker
from farfill.simulator.cache import BlockCache
from farfill.simulator.kernel import Kernel
from farfill.simulator.request import Listeners, Request
from farfill.simulator.times import PrefillTimes


class PrefillServer:
    """Owner calls `submit`; `told` is when service begins and when it is finished. `busy_s` counts service."""

    def __init__(
        self,
        kernel: Kernel,
        instance: Instance,
        times: PrefillTimes,
        told: Listeners,
        *,
        cache: BlockCache,
        block_tokens: int,
    ) -> None:
        self._kernel = kernel
        self._times = times
        self._started = told.prefill_started
        self._finished = told.prefill_finished
        self._block_tokens = block_tokens
        self._queue: deque[tuple[Request, int]] = deque()
        self._serving: Request | None = None
        self._from_s = 0.0
        self._to_s = 0.0
        self._version = 0
        self.instance = instance
        self.cache = cache
        self.breaker: CircuitBreaker | None = None
        self.outstanding_tokens = 0
        self.outstanding = 0
        self.busy_s = 0.0

    @property
    def ready(self) -> bool:
        """Takes new work."""
        return self.instance.state is InstanceState.READY

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._queue)

    def left_tokens(self) -> int:
        """Tokens to compute, less the part of the prompt in service that is done."""
        if self._serving is None:
            return self.outstanding_tokens
        share = (self._kernel.now_s - self._from_s) / max(1e-12, self._to_s - self._from_s)
        return self.outstanding_tokens - int(share * self._serving.uncached)

    def expect(self, request: Request) -> None:
        """The gateway sends it; it counts from now on."""
        self.outstanding += 1
        self.outstanding_tokens += request.uncached

    def submit(self, job: tuple[Request, int]) -> None:
        """(request, its attempt) has arrived here."""
        if job[0].attempt != job[1]:
            return
        self._queue.append(job)
        if self._serving is None:
            self._next()

    def forget(self, request: Request) -> None:
        """The request is not expected any more, or through."""
        self.outstanding -= 1
        self.outstanding_tokens -= request.uncached

    def fail(self) -> list[Request]:
        """The instance dies: everything here, in order."""
        lost = [] if self._serving is None else [self._serving]
        lost += [request for request, attempt in self._queue if request.attempt == attempt]
        self._queue.clear()
        self._serving = None
        self._version += 1
        self.cache.clear()
        return lost

    def withdraw(self, request: Request) -> None:
        """Its attempt was given up; one that waits is passed over by its attempt number."""
        if self._serving is request:
            self._serving = None
            self._version += 1
            self.busy_s += self._kernel.now_s - self._from_s
            self._next()

    def _next(self) -> None:
        while self._queue:
            request, attempt = self._queue.popleft()
            if request.attempt != attempt:
                continue
            now_s = self._kernel.now_s
            self._take_hit(request)
            seconds = self._times.alone_s(request.uncached) * request.pace
            if self._queue:
                seconds /= self._times.batch_speedup
            self._serving, self._from_s, self._to_s = request, now_s, now_s + seconds
            self._version += 1
            request.prefill_from_s = now_s
            request.prefill_to_s = now_s + seconds
            self._kernel.at(self._to_s, self._end, self._version)
            self._started(request)
            return

    def _take_hit(self, request: Request) -> None:
        """What the gateway believed was cached is not what is: the difference is computed, and told."""
        hit = self.cache.leading(request.keys) * self._block_tokens if request.keys else 0
        request.cached = min(hit, request.prompt - 1)
        uncached = max(0, request.prompt - 1 - request.cached)
        self.outstanding_tokens += uncached - request.uncached
        request.uncached = uncached

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        request = self._serving
        assert request is not None
        self._serving = None
        self.busy_s += self._to_s - self._from_s
        self.cache.add(request.keys)
        self._next()
        self._finished(request)
