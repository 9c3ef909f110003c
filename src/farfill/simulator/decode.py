"""A simulated decode instance: continuous batching, with its steps counted instead of simulated one by one.

All running sequences take each step together, so the number of steps done is one growing number whose pace changes
only when a sequence joins or leaves. A sequence joins at the next step's beginning and leaves after as many steps as it
has output tokens. Prompts that are prefilled here take turns with steps, a chunk and a step, as in `engine.scheduler`.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil

from farfill.core.cluster import Instance, InstanceState
from farfill.simulator.cache import BlockCache
from farfill.simulator.kernel import Kernel
from farfill.simulator.request import Listeners, Request
from farfill.simulator.times import PrefillTimes, StepTimes

_FIRST, _LAST = 0, 1


class DecodeServer:
    """Owner calls `prefill` or `join`; `told` is of prompts prefilled here, of first tokens and of what is finished."""

    def __init__(
        self,
        kernel: Kernel,
        instance: Instance,
        steps: StepTimes,
        prefill_times: PrefillTimes | None,
        told: Listeners,
        *,
        cache: BlockCache,
        chunk_tokens: int,
    ) -> None:
        self._kernel = kernel
        self._steps = steps
        self._prefill_times = prefill_times
        self._chunk_tokens = chunk_tokens
        self._prefilled = told.locally_prefilled
        self._first = told.first_token
        self._finished = told.finished
        self._running: dict[Request, float] = {}
        self._joining: deque[tuple[Request, int]] = deque()
        self._prompts: deque[tuple[Request, int]] = deque()
        self._computing: Request | None = None
        self._chunk_s = 0.0
        self._ends: list[tuple[float, int, int, Request, int]] = []
        self._done = 0.0
        self._at_s = 0.0
        self._step_s = 1.0
        self._context = 0.0
        self._number = 0
        self._planned = (-1.0, 0.0)
        self._version = 0
        self._prompt_version = 0
        self.instance = instance
        self.cache = cache
        self.expected: dict[Request, None] = {}
        self.waiting_tokens = 0
        self.busy_s = 0.0

    @property
    def ready(self) -> bool:
        """Takes new work."""
        return self.instance.state is InstanceState.READY

    @property
    def running(self) -> int:
        """Sequences that take steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place in the batch or for their prefill here."""
        return len(self._joining) + len(self._prompts)

    @property
    def can_prefill(self) -> bool:
        """Its profile has prefill times."""
        return self._prefill_times is not None

    def gap_s(self) -> float | None:
        """Seconds between two tokens now; None: nothing runs."""
        return self._pace() if self._running else None

    def prefill(self, request: Request) -> None:
        """Compute its prompt here, then `prefilled` is told and the owner lets it join."""
        self.waiting_tokens += request.uncached
        self._prompts.append((request, request.attempt))
        if self._computing is None:
            self._next_prompt()

    def join(self, request: Request) -> None:
        """Its KV is here: it takes steps as soon as there is room."""
        self._joining.append((request, request.attempt))
        self._advance()
        self._admit()
        self._plan()

    def found_tokens(self, request: Request, block_tokens: int) -> int:
        """How much of a prompt it reports to have had, now that its KV is here."""
        return self.cache.leading(request.keys) * block_tokens

    def fail(self) -> list[Request]:
        """The instance dies: all requests that count on it, in the order they were placed."""
        lost = list(self.expected)
        self.expected.clear()
        self._running.clear()
        self._joining.clear()
        self._prompts.clear()
        self._ends.clear()
        self._computing = None
        self._context = 0.0
        self.waiting_tokens = 0
        self._planned = (-1.0, 0.0)
        self._version += 1
        self._prompt_version += 1
        self.cache.clear()
        return lost

    def _next_prompt(self) -> None:
        assert self._prefill_times is not None
        while self._prompts:
            request, attempt = self._prompts.popleft()
            if request.attempt != attempt:
                continue
            self._advance()
            seconds = self._prefill_times.alone_s(request.uncached) * request.pace
            chunks = max(1, ceil(request.uncached / self._chunk_tokens))
            step_s = self._pace() if self._running else 0.0
            self._computing, self._chunk_s = request, seconds / chunks
            request.prefill_from_s = self._kernel.now_s
            request.prefill_to_s = self._kernel.now_s + seconds + chunks * step_s
            self._prompt_version += 1
            self._kernel.at(request.prefill_to_s, self._prompt_done, self._prompt_version)
            self._plan()
            return

    def _prompt_done(self, version: int) -> None:
        if version != self._prompt_version:
            return
        request = self._computing
        assert request is not None
        self._advance()
        self._computing, self._chunk_s = None, 0.0
        self.waiting_tokens -= request.uncached
        self._plan()
        self._next_prompt()
        self._prefilled(request)

    def _admit(self) -> None:
        joining, running, ends = self._joining, self._running, self._ends
        while joining and len(running) < self._steps.max_batch:
            request, attempt = joining.popleft()
            if request.attempt != attempt:
                continue
            begins = ceil(self._done - 1e-9)
            running[request] = begins
            self._context += request.prompt - begins
            number = self._number = self._number + 2
            heappush(ends, (begins + 1, number - 1, _FIRST, request, attempt))
            heappush(ends, (begins + request.output, number, _LAST, request, attempt))

    def _pace(self) -> float:
        count = len(self._running)
        if self._steps.flat:
            return self._steps.alone[count] + self._chunk_s
        context = self._context / count + self._done
        return self._steps.seconds(count, context) + self._chunk_s

    def _advance(self) -> None:
        """Steps done until now, at the pace since the last change."""
        now_s = self._kernel.now_s
        if self._running:
            passed_s = now_s - self._at_s
            self._done += passed_s / self._step_s
            self.busy_s += passed_s
        self._at_s = now_s

    def _plan(self) -> None:
        if not self._running:
            self._version += 1
            self._planned = (-1.0, 0.0)
            self._done = float(ceil(self._done - 1e-9))
            return
        self._step_s = self._pace()
        planned = (self._ends[0][0], self._step_s)
        if planned == self._planned:
            return  # the event under way is still right
        self._planned = planned
        self._version += 1
        left = max(0.0, planned[0] - self._done)
        self._kernel.at(self._kernel.now_s + left * self._step_s, self._reached, self._version)

    def _reached(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._planned = (-1.0, 0.0)
        step = self._ends[0][0]
        self._done = max(self._done, step)
        told: list[tuple[int, Request]] = []
        while self._ends and self._ends[0][0] <= step + 1e-6:
            _, _, kind, request, attempt = heappop(self._ends)
            if request.attempt != attempt:
                continue
            if kind == _LAST:
                self._context -= request.prompt - self._running.pop(request)
            told.append((kind, request))
        self._admit()
        self._plan()
        for kind, request in told:
            if kind == _FIRST:
                self._first(request)
            else:
                self._finished(request)
