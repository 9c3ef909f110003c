"""A simulated engine that computes prompts in turns: what `engine.scheduler` and `engine.prefill` do, step by step.

A step is one chunk of the prompt whose turn it is, and one token for every running sequence. Who waited longest for a
turn is next, tenants taking turns first. It costs an event a step, so it is for runs of thousands of requests; the
servers of `decode` and `prefill`, which finish one prompt after the other, are for millions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from farfill.core.cluster import Instance
from farfill.simulator.cache import BlockCache
from farfill.simulator.decode import DecodeServer
from farfill.simulator.kernel import Kernel
from farfill.simulator.prefill import PrefillServer
from farfill.simulator.request import Listeners, Request, Told
from farfill.simulator.times import PrefillTimes, StepTimes

_TURNS_PER_FAIR_TURN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Tokens of a chunk; tokens of a piece, after which running sequences get their turn; prompts and sequences."""

    chunk_tokens: int
    step_tokens: int
    max_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEvents:
    """Who is asked and told. `admitted`: a prompt has a place now; how many of its tokens are there? `chunk_done`: so
    many of its tokens are computed. For the others see `Listeners`."""

    admitted: Callable[[Request], int]
    computing: Callable[[Request, int, int, float], None]
    chunk_done: Callable[[Request, int], None]
    prompt_done: Told
    first: Told
    finished: Told


@dataclass(slots=True, eq=False)
class _Prompt:
    request: Request
    done: int
    number: int
    last_turn: int = 0


class Turns:
    """Owner calls `add`, `run` and `drop`. `times` are needed to prefill, `steps` to decode."""

    def __init__(
        self,
        kernel: Kernel,
        limits: TurnLimits,
        times: PrefillTimes | None,
        steps: StepTimes | None,
        told: TurnEvents,
    ) -> None:
        self._kernel = kernel
        self._limits = limits
        self._times = times
        self._steps = steps
        self._told = told
        self._waiting: deque[tuple[Request, bool]] = deque()
        self._prompts: dict[Request, _Prompt] = {}
        self._running: dict[Request, int] = {}
        self._tenant_turns: dict[str, int] = {}
        self._current: tuple[_Prompt, int] | None = None
        self._turn = 0
        self._number = 0
        self._version = 0
        self._active = False
        self._from_s = 0.0
        self.busy_s = 0.0

    @property
    def running(self) -> int:
        """Sequences being decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Prompts that are not complete, and sequences without a row yet."""
        return len(self._waiting) + len(self._prompts)

    def pace_s(self) -> float | None:
        """Seconds of a decode step now; None: nothing runs."""
        return self._step_s() if self._running else None

    def add(self, request: Request) -> None:
        """Compute its prompt; then `prompt_done` is told."""
        self._waiting.append((request, True))
        self._wake()

    def run(self, request: Request) -> None:
        """Its KV is here: decode it."""
        self._waiting.append((request, False))
        self._wake()

    def drop(self, request: Request) -> None:
        """It is not wanted any more; a piece being computed is computed to its end."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not request)
        self._prompts.pop(request, None)
        self._running.pop(request, None)

    def clear(self) -> None:
        """The instance died."""
        self._waiting.clear()
        self._prompts.clear()
        self._running.clear()
        self._tenant_turns.clear()
        self._current = None
        self._active = False
        self._version += 1

    def _wake(self) -> None:
        if not self._active:
            self._active = True
            self._from_s = self._kernel.now_s
            self._step()

    def _step(self) -> None:
        self._admit()
        prompt = self._next()
        if prompt is not None:
            self._compute(prompt)
        elif self._running:
            self._decode()
        else:
            self._active = False
            self.busy_s += self._kernel.now_s - self._from_s

    def _admit(self) -> None:
        while self._waiting and len(self._prompts) + len(self._running) < self._limits.max_rows:
            request, prefills = self._waiting.popleft()
            if not prefills:
                self._running[request] = 0
                continue
            self._number += 1
            self._prompts[request] = _Prompt(request, self._told.admitted(request), self._number, self._turn)
            self._tenant_turns.setdefault(request.tenant, self._turn)

    def _next(self) -> _Prompt | None:
        if self._current is not None:
            return self._current[0] if self._current[0].request in self._prompts else self._turn_over()
        if not self._prompts:
            self._tenant_turns.clear()
            return None
        self._turn += 1
        fair = self._turn % _TURNS_PER_FAIR_TURN == 0

        def order(prompt: _Prompt) -> tuple[int, int, int]:
            tenant = 0 if fair else self._tenant_turns.get(prompt.request.tenant, 0)
            return tenant, prompt.last_turn, prompt.number

        chosen = min(self._prompts.values(), key=order)
        chosen.last_turn = self._tenant_turns[chosen.request.tenant] = self._turn
        last = chosen.request.prompt - 1
        chunk = self._limits.chunk_tokens
        self._current = chosen, min(last, (chosen.done // chunk + 1) * chunk)
        return chosen

    def _turn_over(self) -> _Prompt | None:
        self._current = None
        return self._next()

    def _compute(self, prompt: _Prompt) -> None:
        assert self._times is not None
        assert self._current is not None
        start, chunk_end = prompt.done, self._current[1]
        end = min(chunk_end, start + self._limits.step_tokens)
        # What a prompt costs whatever its length belongs to its first piece.
        before_s = self._times.alone_s(start) if start else 0.0
        seconds = max(0.0, self._times.alone_s(end) - before_s) * prompt.request.pace if end > start else 0.0
        if prompt.request.prefill_from_s < 0:
            prompt.request.prefill_from_s = self._kernel.now_s
        self._told.computing(prompt.request, start, end, seconds)
        self._kernel.at(self._kernel.now_s + seconds, self._computed, (self._version, prompt, end))

    def _computed(self, job: tuple[int, _Prompt, int]) -> None:
        version, prompt, end = job
        if version != self._version:
            return
        prompt.done = end
        request = prompt.request
        if self._current is not None and end >= self._current[1]:
            self._current = None
            if request in self._prompts:
                self._told.chunk_done(request, end)
        if request in self._prompts and end >= request.prompt - 1:
            del self._prompts[request]
            request.prefill_to_s = self._kernel.now_s
            self._told.prompt_done(request)
            self._admit()
        if self._running:
            self._decode()
        else:
            self._step()

    def _step_s(self) -> float:
        assert self._steps is not None
        count = min(len(self._running), self._steps.max_batch)
        context = sum(r.prompt + made for r, made in self._running.items()) / len(self._running)
        return self._steps.seconds(count, context)

    def _decode(self) -> None:
        self._kernel.at(self._kernel.now_s + self._step_s(), self._decoded, (self._version, tuple(self._running)))

    def _decoded(self, job: tuple[int, tuple[Request, ...]]) -> None:
        version, batch = job
        if version != self._version:
            return
        for request in batch:
            if request not in self._running:
                continue
            made = self._running[request] = self._running[request] + 1
            if made == 1:
                self._told.first(request)
            if made >= request.output:
                self._running.pop(request, None)
                self._told.finished(request)
        if version == self._version:
            self._step()


class TurnsPrefill(PrefillServer):
    """A prefill instance of that kind."""

    def __init__(
        self,
        kernel: Kernel,
        instance: Instance,
        times: PrefillTimes,
        told: Listeners,
        *,
        cache: BlockCache,
        block_tokens: int,
        limits: TurnLimits,
    ) -> None:
        super().__init__(kernel, instance, times, told, cache=cache, block_tokens=block_tokens)
        events = TurnEvents(
            admitted=self._admitted,
            computing=told.computing,
            chunk_done=self._chunk_done,
            prompt_done=self._done,
            first=_nothing,
            finished=_nothing,
        )
        self._turns = Turns(kernel, limits, times, None, events)
        self._there: dict[Request, None] = {}

    @property
    def waiting(self) -> int:
        return max(0, self._turns.waiting - 1)

    def left_tokens(self) -> int:
        return self.outstanding_tokens

    def submit(self, job: tuple[Request, int]) -> None:
        request, attempt = job
        if request.attempt == attempt:
            self._there[request] = None
            self._turns.add(request)

    def fail(self) -> list[Request]:
        lost = list(self._there)
        self._there.clear()
        self._turns.clear()
        self.cache.clear()
        return lost

    def withdraw(self, request: Request) -> None:
        self._there.pop(request, None)
        self._turns.drop(request)

    def _admitted(self, request: Request) -> int:
        self._take_hit(request)
        return request.cached

    def _chunk_done(self, request: Request, tokens: int) -> None:
        self.cache.add(request.keys[: tokens // self._block_tokens])

    def _done(self, request: Request) -> None:
        self._there.pop(request, None)
        self.busy_s = self._turns.busy_s
        self._finished(request)


class TurnsDecode(DecodeServer):
    """A decode instance of that kind; it also prefills what stays near."""

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
        block_tokens: int,
        limits: TurnLimits,
    ) -> None:
        super().__init__(kernel, instance, steps, prefill_times, told, cache=cache, chunk_tokens=chunk_tokens)
        events = TurnEvents(
            admitted=self._admitted,
            computing=_no_transfer,
            chunk_done=self._chunk_done,
            prompt_done=self._prompt_ready,
            first=told.first_token,
            finished=told.finished,
        )
        self._turns = Turns(kernel, limits, prefill_times, steps, events)
        self._block_tokens = block_tokens
        self._here: dict[Request, int] = {}

    @property
    def running(self) -> int:
        return self._turns.running

    @property
    def waiting(self) -> int:
        return self._turns.waiting

    def gap_s(self) -> float | None:
        return self._turns.pace_s()

    def prefill(self, request: Request) -> None:
        self.waiting_tokens += request.uncached
        self._turns.add(request)

    def join(self, request: Request) -> None:
        self._turns.run(request)

    def fail(self) -> list[Request]:
        lost = super().fail()
        self._turns.clear()
        self._here.clear()
        return lost

    def found_tokens(self, request: Request, block_tokens: int) -> int:
        # What was computed here is in the cache by now.
        return self._here.pop(request) if request in self._here else super().found_tokens(request, block_tokens)

    def _admitted(self, request: Request) -> int:
        """While it waited others may have computed what it begins with."""
        hit = self.cache.leading(request.keys) * self._block_tokens
        request.cached = min(hit, request.prompt - 1)
        uncached = max(0, request.prompt - 1 - request.cached)
        self.waiting_tokens += uncached - request.uncached
        request.uncached = uncached
        if request.keys:
            self._here[request] = request.cached
        return request.cached

    def _chunk_done(self, request: Request, tokens: int) -> None:
        self.cache.add(request.keys[: tokens // self._block_tokens])

    def _prompt_ready(self, request: Request) -> None:
        self.waiting_tokens -= request.uncached
        self._prefilled(request)


def _nothing(_: Request) -> None:
    """Nobody needs to know."""


def _no_transfer(_: Request, start: int, end: int, seconds: float) -> None:
    """What is computed where it is decoded stays there."""
