"""The prompts being prefilled: one chunk of one of them a step, in turns, so a short one never waits for a long one.

Twin of `decode`: `add`, `drop_done`, `step`.
"""

from __future__ import annotations

from collections import deque

from farfill.clock import Clock
from farfill.core.layout import KVLayout
from farfill.engine.executor import Executor
from farfill.engine.jobs import Job
from farfill.engine.prefix import PrefixCache


class PrefillTurns:
    """Jobs whose prompt is not complete, and the way a job becomes complete."""

    def __init__(self, executor: Executor, prefix: PrefixCache, clock: Clock) -> None:
        self._executor = executor
        self._prefix = prefix
        self._clock = clock
        self._jobs: deque[Job] = deque()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs in turn."""
        return tuple(self._jobs)

    def add(self, job: Job) -> None:
        """Take a job that has its KV memory; use what is there already. It may be complete at once."""
        job.started_s = self._clock.now_s()
        job.started = True
        kv = job.kv
        assert kv is not None
        hit, job.hit = job.hit, None
        if hit is not None:
            # A slot's hit counts among its valid tokens; if not all of it is valid, the look-up below finds it again.
            if hit.tokens <= job.valid_tokens:
                hit.copy_into(kv)
                job.cached_tokens = hit.tokens
            hit.release()
        if job.valid_tokens:
            kv.attach(job.valid_tokens)
        self._use_prefix(job)
        start, step = kv.tokens, self._layout.prefill_chunk_tokens
        job.ready_tokens = start
        for chunk in range(min(len(job.keys), start // step)):
            self._prefix.insert(job.keys, chunk, kv)
        if start:
            job.chunks_ready(0, -(-start // step))
        self._jobs.append(job)

    def drop_done(self) -> None:
        """Forget jobs that ended otherwise."""
        self._jobs = deque(job for job in self._jobs if not job.done)

    def take_complete(self) -> list[Job]:
        """Remove and return the jobs whose prompt is complete."""
        complete = [job for job in self._jobs if _is_complete(job)]
        self._jobs = deque(job for job in self._jobs if not _is_complete(job))
        return complete

    def step(self) -> bool:
        """Compute one chunk of the next job in turn; False when there is none. A failure ends that job only."""
        if not self._jobs:
            return False
        job = self._jobs[0]
        self._jobs.rotate(-1)
        try:
            self._compute_chunk(job)
        except Exception as error:
            job.fail(error)
        return True

    @property
    def _layout(self) -> KVLayout:
        return self._executor.layout

    def _use_prefix(self, job: Job) -> None:
        """Copy the snapshots that reach further than what the job has."""
        kv = job.kv
        hit = self._prefix.find(job.keys) if job.keys else None
        if hit is None or kv is None:
            return
        if hit.tokens > kv.tokens:
            job.cached_tokens += hit.tokens - kv.tokens
            hit.copy_into(kv, kv.tokens)
        hit.release()

    def _compute_chunk(self, job: Job) -> None:
        kv, step = job.kv, self._layout.prefill_chunk_tokens
        assert kv is not None
        begun_s = self._clock.now_s()
        start = kv.tokens
        end = min(start + step, job.num_tokens)
        self._executor.prefill(kv, job.prompt[start:end])
        job.compute_s += self._clock.now_s() - begun_s
        job.computed_tokens += end - start
        job.ready_tokens = end
        chunk = start // step
        if chunk < len(job.keys):
            self._prefix.insert(job.keys, chunk, kv)
        job.chunks_ready(chunk, chunk + 1)


def _is_complete(job: Job) -> bool:
    return job.kv is not None and job.kv.tokens >= job.num_tokens
