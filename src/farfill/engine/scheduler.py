"""The engine's thread: admits what fits, then alternates one prefill chunk and one decode step.

So running streams never pause for longer than one prefill chunk. Waiting jobs start in order; only jobs that
bring their own KV memory (a filled slot) may pass one that waits for memory, otherwise both could wait forever.
An error in a job's step ends that job; any other error ends the engine and everything in it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from farfill.clock import Clock
from farfill.core.errors import CapacityError, EngineError
from farfill.engine.decode import DecodeBatch
from farfill.engine.executor import Executor
from farfill.engine.jobs import GenerateJob, Job
from farfill.engine.memory import KVMemory
from farfill.engine.prefill import PrefillTurns
from farfill.engine.prefix import PrefixCache
from farfill.engine.protocol import EngineLoad

_log = logging.getLogger(__name__)

# Giving memory back costs the next step a little, so it waits until a pause is real.
_IDLE_AFTER_S = 1.0
# Often enough for any peer's patience, rare enough to cost nothing.
_PROGRESS_PERIOD_S = 0.05


class Scheduler:
    """Owner of all jobs. `submit`, `wake`, `load`, `start` and `close` may be called from any thread."""

    def __init__(
        self,
        executor: Executor,
        memory: KVMemory,
        prefix: PrefixCache,
        *,
        max_batch: int,
        max_queue: int,
        clock: Clock,
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._prefix = prefix
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._clock = clock
        self._prefill = PrefillTurns(executor, prefix, clock)
        self._decode = DecodeBatch(executor, max_batch)
        self._reported_s = clock.now_s()
        executor.on_progress = self._report_progress
        self._waiting: deque[Job] = deque()
        self._jobs: dict[Job, None] = {}
        self._changed = threading.Condition()
        self._woken = False
        self._closing = False
        self._dead: EngineError | None = None
        self._thread: threading.Thread | None = None

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
        if queues and len(self._waiting) >= self._max_queue:
            raise CapacityError(f"{self._max_queue} requests are waiting already", reason="queue_full")

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
            self._waiting.append(job)
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
            prefix_cache_bytes=self._prefix.used_bytes,
        )

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        with self._changed:
            return all(job.done for job in self._jobs)

    def _run(self) -> None:
        try:
            while self._await_work():
                self._drop_cancelled()
                self._admit()
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
        busy = bool(self._prefill.jobs or len(self._decode))
        with self._changed:
            if not busy and not self._woken and not self._closing:
                self._changed.wait_for(lambda: self._woken or self._closing, _IDLE_AFTER_S)
                if not self._woken and not self._closing:
                    self._executor.idle()
                    self._changed.wait_for(lambda: self._woken or self._closing)
            self._woken = False
            return not self._closing

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [job for job in self._jobs if job.cancelled]
            if cancelled:
                self._waiting = deque(job for job in self._waiting if not job.cancelled)
        for job in cancelled:
            job.fail_cancelled()
        if cancelled:
            self._prefill.drop_done()
            self._decode.drop_done()

    def _admit(self) -> None:
        """Start waiting jobs while there are rows and memory for them."""
        rows = len(self._decode) + sum(job.demand.rows for job in self._prefill.jobs)
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
            admitted: list[Job] = []
            memory_short = False
            while waiting:
                job = waiting.popleft()
                # More choices than a batch has rows still run, alone, in turns.
                has_rows = rows == 0 or rows + job.demand.rows <= self._max_batch
                if has_rows and (job.hold is not None or (not memory_short and self._take_memory(job))):
                    rows += job.demand.rows
                    admitted.append(job)
                    continue
                self._waiting.append(job)
                if not has_rows:
                    self._waiting.extend(waiting)
                    break
                memory_short = True
        for job in admitted:
            try:
                if job.kv is None:
                    job.kv = self._executor.allocate(job.demand.capacity_tokens)
                self._prefill.add(job)
            except Exception as error:
                job.fail(error)
        self._prefill.drop_done()
        self._finish_prompts()

    def _take_memory(self, job: Job) -> bool:
        try:
            job.hold = self._memory.hold(job, job.demand.nbytes)
        except CapacityError:
            return False
        return True

    def _step(self) -> bool:
        prefilled = self._prefill.step()
        self._prefill.drop_done()
        self._finish_prompts()
        decoded = self._decode.step()
        return prefilled or decoded

    def _finish_prompts(self) -> None:
        for job in self._prefill.take_complete():
            try:
                choices = job.prompt_ready()
            except Exception as error:
                job.fail(error)
                continue
            if isinstance(job, GenerateJob):
                self._decode.add(job, choices)

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
            self._waiting.clear()
        for job in jobs:
            if error is None:
                job.fail_cancelled()
            else:
                job.fail(error)
        self._prefill.drop_done()
        self._decode.drop_done()
