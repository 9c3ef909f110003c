"""The engine's thread: admits what fits, then alternates pieces of prefill work and decode steps.

A step is at most one piece of prefill work (a prefill chunk, or as many of its layers as the token budget allows) and
one token for every running sequence, so running streams never pause for longer than that. Jobs start in the order of
`engine.queue`; only jobs that bring their own KV memory (a filled slot) may pass one that waits for memory, otherwise
both could wait forever. When memory is short, sequences are set back: their KV is dropped and computed again later,
in the same steps as before, so that the output stays the same. An error in a job's step ends that job; any other
error ends the engine and everything in it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from farfill.clock import Clock
from farfill.core.errors import CapacityError, EngineError
from farfill.engine.decode import DecodeBatch
from farfill.engine.executor import Executor
from farfill.engine.jobs import GenerateJob, Job
from farfill.engine.limits import EngineLimits
from farfill.engine.memory import KVMemory
from farfill.engine.prefill import PrefillTurns
from farfill.engine.prefix import PrefixCache
from farfill.engine.protocol import EngineLoad, EngineTotals
from farfill.engine.queue import WaitingQueue

_log = logging.getLogger(__name__)

# Giving memory back costs the next step a little, so it waits until a pause is real.
_IDLE_AFTER_S = 1.0
# Often enough for any peer's patience, rare enough to cost nothing.
_PROGRESS_PERIOD_S = 0.05
# How much more of a sequence's KV memory is held at a time, as its output grows.
_GROWTH_TOKENS = 256


class Scheduler:
    """Owner of all jobs. `submit`, `wake`, `load`, `start` and `close` may be called from any thread."""

    def __init__(
        self, executor: Executor, memory: KVMemory, prefix: PrefixCache, limits: EngineLimits, clock: Clock
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._prefix = prefix
        self._limits = limits
        self._clock = clock
        self._decode = DecodeBatch(executor, limits.max_batch, self._has_room)
        self._prefill = PrefillTurns(executor, prefix, clock, budget=self._prefill_budget, pause=self._between_layers)
        self._reported_s = clock.now_s()
        executor.on_progress = self._report_progress
        self._waiting = WaitingQueue()
        self._jobs: dict[Job, None] = {}
        self._changed = threading.Condition()
        self._woken = False
        self._closing = False
        self._dead: EngineError | None = None
        self._thread: threading.Thread | None = None
        self._set_back_growth = 0
        self._set_back_priority = 0

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="farfill-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Fail all jobs with CancelledWorkError and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            self._end_all(None)
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def require_open(self, *, queues: bool) -> None:
        """Raise EngineError when dead or closed, CapacityError (queue_full) when work `queues` and may not."""
        if self._dead is not None:
            raise EngineError(f"the engine died: {self._dead}", reason="engine_dead") from self._dead
        if self._closing:
            raise EngineError("the engine is closed", reason="engine_closed")
        if queues and len(self._waiting) >= self._limits.max_queue:
            raise CapacityError(f"{self._limits.max_queue} requests are waiting already", reason="queue_full")

    def memory_is_contended(self) -> bool:
        """Whether a job is waiting for KV memory, so nobody else may take any past it."""
        with self._changed:
            return any(job.hold is None for job in self._waiting)

    def submit(self, job: Job) -> None:
        """Queue a job; one that brings no memory gets it now or, when others wait for some, after them."""
        with self._changed:
            self.require_open(queues=job.hold is None)
            job.submitted_s = self._clock.now_s()
            if job.hold is None and not self.memory_is_contended():
                self._take_memory(job)
            self._waiting.add(job)
            self._jobs[job] = None
            self._woken = True
            self._changed.notify()

    def wake(self) -> None:
        """Look again: something was cancelled or memory came back."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def load(self) -> EngineLoad:
        """How busy the engine is now."""
        with self._changed:
            jobs = tuple(self._jobs)
        return EngineLoad(
            queued_tokens=sum(job.uncomputed_tokens for job in jobs),
            running_sequences=sum(job.open_rows for job in jobs if job.started),
            waiting_sequences=sum(job.open_rows for job in jobs if not job.started),
            kv_used_bytes=self._memory.used_bytes,
            kv_filled_bytes=self._memory.filled_bytes,
            kv_most_bytes=self._memory.most_bytes,
            prefix_cache_bytes=self._prefix.used_bytes,
            prefix_pinned_bytes=self._prefix.pinned_bytes,
            totals=self._totals(),
        )

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._changed:
            return all(job.done for job in self._jobs)

    def _totals(self) -> EngineTotals:
        dropped_room, dropped_age = self._prefix.evicted
        return EngineTotals(
            decode_steps=self._decode.steps,
            prefill_chunks=self._prefill.chunks,
            prefix_hits=self._prefill.hits,
            prefix_misses=self._prefill.misses,
            hit_tokens=self._prefill.hit_tokens,
            miss_tokens=self._prefill.miss_tokens,
            set_back_growth=self._set_back_growth,
            set_back_priority=self._set_back_priority,
            prefix_dropped_room=dropped_room,
            prefix_dropped_age=dropped_age,
            prefix_pins_refused=self._prefix.pins_refused,
        )

    def _run(self) -> None:
        try:
            while self._await_work():
                self._make_way()
                stepped = self._step()
                self._forget_done()
                if stepped:
                    self._report_step()
            self._end_all(None)
        except BaseException as error:
            _log.exception("the engine thread died")
            dead = EngineError(f"{type(error).__name__}: {error}", reason="engine_dead")
            with self._changed:
                self._dead = dead
            self._end_all(dead)

    def _await_work(self) -> bool:
        """Wait until there is something to do; False when the engine closes."""
        busy = bool(self._prefill.busy or len(self._decode))
        expiry_s = self._prefix.expire()
        with self._changed:
            if not busy and not self._woken and not self._closing:
                self._changed.wait_for(lambda: self._woken or self._closing, _IDLE_AFTER_S)
                if not self._woken and not self._closing:
                    self._executor.idle()
                    self._changed.wait_for(lambda: self._woken or self._closing, expiry_s)
            self._woken = False
            return not self._closing

    def _step(self) -> bool:
        prefilled = self._prefill.step()
        self._prefill.drop_done()
        self._finish_prompts()
        decoded = self._decode.step()
        return prefilled or decoded

    def _between_layers(self) -> None:
        """A prefill chunk has taken its share of a step: do what else a step does. The chunk's job stays."""
        self._make_way()
        if self._decode.step():
            self._report_step()

    def _prefill_budget(self) -> int:
        return max(1, self._limits.step_token_budget - self._decode.rows_in_step)

    def _make_way(self) -> None:
        """Let go what was withdrawn and start what may start."""
        self._drop_cancelled()
        if len(self._waiting):
            self._admit()

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [job for job in self._jobs if job.cancelled and job is not self._prefill.current]
            for job in cancelled:
                self._waiting.remove(job)
        for job in cancelled:
            job.fail_cancelled()
        if cancelled:
            self._prefill.drop_done()
            self._decode.drop_done()

    def _admit(self) -> None:
        """Start waiting jobs while there are rows and memory for them."""
        with self._changed:
            order = list(self._waiting.in_order())
        admitted: list[Job] = []
        held_up: int | None = None
        for job in order:
            # Nothing passes a job that waits for rows or memory, but what is more urgent than it.
            if held_up is not None and job.priority >= held_up and job.hold is None:
                continue
            if not self._has_rows(job, admitted) or (job.hold is None and not self._find_memory(job)):
                held_up = job.priority if held_up is None else min(held_up, job.priority)
                continue
            with self._changed:
                self._waiting.start(job)
            admitted.append(job)
        for job in admitted:
            try:
                if job.kv is None:
                    job.kv = self._executor.allocate(job.demand.capacity_tokens, dense=job.demand.is_whole)
                self._prefill.add(job)
            except Exception as error:
                job.fail(error)
        self._prefill.drop_done()
        self._finish_prompts()

    def _has_rows(self, job: Job, admitted: list[Job]) -> bool:
        """Whether the batch has rows for a job, maybe after setting back what has a lower priority.

        Exports never decode, so they are counted apart, up to as many.
        """
        decodes = isinstance(job, GenerateJob)
        while True:
            alike = [o for o in (*self._prefill.jobs, *admitted) if isinstance(o, GenerateJob) is decodes]
            taken = sum(other.open_rows for other in alike) + (len(self._decode) if decodes else 0)
            # More choices than a batch has rows still run, alone, in turns.
            if not taken or taken + job.open_rows <= self._limits.max_batch:
                return True
            if not decodes:
                return False
            victim = self._victim(lambda other: other.priority > job.priority)
            if victim is None:
                return False
            self._set_back(victim)
            self._set_back_priority += 1

    def _find_memory(self, job: Job) -> bool:
        """Take memory for a job, maybe that of sequences of lower priority if theirs is enough."""
        if self._take_memory(job):
            return True
        lower = [j for j in self._running() if j.priority > job.priority and j.hold is not None]
        at_stake = sum(j.hold.nbytes for j in lower if j.hold is not None)
        if self._memory.free_bytes + at_stake < job.memory_wanted:
            return False
        while not self._take_memory(job):
            victim = self._victim(lambda other: other.priority > job.priority)
            if victim is None:
                return False
            self._set_back(victim)
            self._set_back_priority += 1
        return True

    def _take_memory(self, job: Job) -> bool:
        try:
            job.hold = self._memory.hold(job, job.memory_wanted)
        except CapacityError:
            return False
        return True

    def _has_room(self, job: GenerateJob) -> bool:
        """Hold memory for one more token of a running job; when there is none, somebody is set back for it."""
        needed = job.filled_tokens + 1
        if needed <= job.covered_tokens or job.hold is None:
            return True
        grown = min(job.demand.capacity_tokens, job.covered_tokens + _GROWTH_TOKENS)
        nbytes = self._executor.kv_bytes(grown) - self._executor.kv_bytes(job.covered_tokens)
        while True:
            try:
                job.hold.grow(nbytes)
            except CapacityError:
                # Whoever is ahead of all others is never set back for them, so it gets through.
                victim = self._victim(lambda other: _rank(other) > _rank(job))
                if victim is None and self._is_behind(self._prefill.current, job):
                    return False  # once its chunk is complete
                self._set_back(victim or job)
                self._set_back_growth += 1
                if victim is None:
                    return False
                continue
            job.covered_tokens = grown
            return True

    def _running(self) -> list[GenerateJob]:
        """Jobs that may be set back: an export's bytes are on their way, and a chunk that is computed stays."""
        prefilling = [job for job in self._prefill.jobs if isinstance(job, GenerateJob)]
        return [job for job in (*prefilling, *self._decode.jobs) if job is not self._prefill.current and not job.done]

    def _victim(self, may_be: Callable[[GenerateJob], bool]) -> GenerateJob | None:
        """The youngest job of the lowest priority."""
        return max(filter(may_be, self._running()), key=_rank, default=None)

    @staticmethod
    def _is_behind(job: Job | None, other: Job) -> bool:
        return isinstance(job, GenerateJob) and _rank(job) > _rank(other)

    def _set_back(self, job: GenerateJob) -> None:
        self._prefill.remove(job)
        self._decode.remove(job)
        job.set_back()
        with self._changed:
            self._waiting.add(job)

    def _finish_prompts(self) -> None:
        for job in self._prefill.take_complete():
            try:
                rows = job.prompt_ready()
            except Exception as error:
                job.fail(error)
                continue
            self._decode.add(rows)

    def _report_progress(self) -> None:
        """The executor is in the middle of a step."""
        if self._clock.now_s() - self._reported_s >= _PROGRESS_PERIOD_S:
            self._report_step()

    def _report_step(self) -> None:
        self._reported_s = self._clock.now_s()
        with self._changed:
            waiting = tuple(self._waiting)
        for job in (*waiting, *self._prefill.jobs):
            try:
                job.step_done()
            except Exception as error:
                job.fail(error)
                job.cancel()

    def _forget_done(self) -> None:
        with self._changed:
            self._jobs = {job: None for job in self._jobs if not job.done}

    def _end_all(self, error: EngineError | None) -> None:
        with self._changed:
            jobs = tuple(self._jobs)
            self._jobs.clear()
            self._waiting = WaitingQueue()
        for job in jobs:
            if error is None:
                job.fail_cancelled()
            else:
                job.fail(error)
        self._prefill.drop_done()
        self._decode.drop_done()


def _rank(job: Job) -> tuple[int, int]:
    """Who is ahead of whom: by priority, then age."""
    return job.priority, job.number
