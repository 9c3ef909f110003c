"""The prompts being prefilled: one piece of work of one of them a step, in turns, so a short one never waits long.

A piece of work is a run of snapshots copied from the prefix cache, or one prefill chunk. A chunk is interrupted at
layer boundaries for everything else the engine has to do, each time it has computed as much as a step may: half a
chunk's layers count as half its tokens. Chunks themselves are never cut, since that would change how sums round.
Twin of `decode`: `add`, `drop_done`, `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from farfill.clock import Clock
from farfill.core.layout import KVLayout
from farfill.engine.executor import Executor, SequenceKV
from farfill.engine.jobs import Job
from farfill.engine.prefix import PrefixCache, PrefixHit

# Copied in one step at most (and at least one chunk): a few milliseconds.
_COPY_BYTES = 16 << 20
# So often the prompt that waited longest for its turn gets one, whatever the priorities.
_TURNS_PER_FAIR_TURN = 4


class Withdrawn(Exception):  # noqa: N818 (no error: somebody wanted it)
    """The prompt being computed is not wanted any more, or not now."""


class Broken(BaseException):
    """The engine failed while a chunk was interrupted: nothing to do with the chunk's prompt."""


class _Attaching:
    """A prompt whose beginning is being copied from a prefix hit; afterwards `tokens` tokens are there."""

    def __init__(self, hit: PrefixHit, first_chunk: int, tokens: int) -> None:
        self.hit = hit
        self.next_chunk = first_chunk
        self.tokens = tokens
        # Windows and states of the hit, unless those of a later token are in place.
        self.wants_states = tokens == hit.tokens

    def copy(self, kv: SequenceKV, step_tokens: int) -> bool:
        """Copy a run of chunks; whether that was all."""
        copied, end = 0, self.hit.tokens // step_tokens
        while self.next_chunk < end and copied < _COPY_BYTES:
            copied += self.hit.copy_rows(kv, self.next_chunk)
            self.next_chunk += 1
        if self.next_chunk < end:
            return False
        if self.wants_states:
            self.hit.copy_states(kv)
        return True


class PrefillTurns:
    """Jobs whose prompt is not complete, and the way a job becomes complete.

    `pause` is called, on this thread, whenever a chunk has taken `budget()` tokens' worth of a step.
    """

    def __init__(
        self,
        executor: Executor,
        prefix: PrefixCache,
        clock: Clock,
        *,
        budget: Callable[[], int],
        pause: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._prefix = prefix
        self._clock = clock
        self._budget = budget
        self._pause = pause
        self._layers = 1 + max(tensor.layer for tensor in executor.layout.tensors)
        self._jobs: dict[Job, None] = {}
        self._attaching: dict[Job, _Attaching] = {}
        self._snapshots: deque[tuple[Job, int, SequenceKV]] = deque()
        self._tenant_turns: dict[str, int] = {}
        self._turn = 0
        self.current: Job | None = None
        self.chunks = 0
        self.hits = 0
        self.misses = 0
        self.hit_tokens = 0
        self.miss_tokens = 0

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs, as they came."""
        return tuple(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._jobs or self._snapshots)

    def add(self, job: Job) -> None:
        """Take a job that has its KV memory; see what is there already. It may be complete at once."""
        job.started_s = self._clock.now_s()
        job.started = True
        kv = job.kv
        assert kv is not None
        kv.media = job.media_inputs
        self._jobs[job] = None
        # Newcomers get in line; otherwise a stream of them would keep the others waiting.
        job.last_turn = self._turn
        self._tenant_turns.setdefault(job.tenant, self._turn)
        hit, first_chunk = self._choose_hit(job)
        tokens = max(job.valid_tokens, hit.tokens if hit is not None else 0)
        if job.valid_tokens == tokens and job.checkpoints is not None and tokens < job.num_tokens:
            job.checkpoints.copy_into(kv, tokens)
        if hit is None:
            self._attached(job, kv, tokens, None)
        else:
            self._attaching[job] = _Attaching(hit, first_chunk, tokens)

    def drop_done(self) -> None:
        """Forget jobs that ended otherwise."""
        for job in [job for job in self._jobs if job.done]:
            self.remove(job)
        self._snapshots = deque(s for s in self._snapshots if not s[0].done)

    def remove(self, job: Job) -> None:
        """Forget a job."""
        self._jobs.pop(job, None)
        self._attaching.pop(job, None)
        self._snapshots = deque(s for s in self._snapshots if s[0] is not job)

    def take_complete(self) -> list[Job]:
        """Remove and return the jobs whose prompt is complete."""
        complete = [job for job in self._jobs if job.kv is not None and job.kv.tokens >= job.num_tokens]
        for job in complete:
            del self._jobs[job]
        return complete

    def step(self) -> bool:
        """Do one piece of work of the next job in turn; False when there is none. A failure ends that job only."""
        job = self._next()
        if job is None:
            return self._take_snapshot()
        self.current = job
        try:
            if job in self._attaching:
                self._copy_hit(job, self._attaching[job])
            else:
                self._compute_chunk(job)
        except Withdrawn:
            if job.cancelled:
                job.fail_cancelled()
        except Exception as error:
            job.fail(error)
        finally:
            self.current = None
        return True

    @property
    def _layout(self) -> KVLayout:
        return self._executor.layout

    def _choose_hit(self, job: Job) -> tuple[PrefixHit | None, int]:
        """The hit to copy from, owned by the job from now on, and its first chunk that is not there otherwise.

        A slot's own hit stands for pieces that were never sent, so its rows are always copied.
        """
        own = job.hit
        there = max(job.valid_tokens, own.tokens if own is not None else 0)
        found = None
        if job.keys and there < job.num_tokens:
            found = self._prefix.find(job.keys, every_checkpoint=job.exports_checkpoints)
        if found is not None and found.tokens > there:
            first = 0 if own is not None else job.valid_tokens // self._layout.prefill_chunk_tokens
            if own is not None:
                own.release()
        else:
            if found is not None:
                found.release()
            found, first = own, 0
        job.hit = found
        received = max(0, job.valid_tokens - (own.tokens if own is not None else 0))
        tokens = max(job.valid_tokens, found.tokens if found is not None else 0)
        job.cached_tokens = tokens - received
        self._count(job, tokens)
        return found, first

    def _count(self, job: Job, tokens: int) -> None:
        if not job.keys:
            return
        if job.cached_tokens:
            self.hits += 1
        elif tokens < job.num_tokens:
            self.misses += 1
        self.hit_tokens += job.cached_tokens

    def _copy_hit(self, job: Job, attaching: _Attaching) -> None:
        kv = job.kv
        assert kv is not None
        if attaching.copy(kv, self._layout.prefill_chunk_tokens):
            del self._attaching[job]
            job.hit = None
            try:
                self._attached(job, kv, attaching.tokens, attaching.hit)
            finally:
                attaching.hit.release()

    def _attached(self, job: Job, kv: SequenceKV, tokens: int, hit: PrefixHit | None) -> None:
        """The first `tokens` tokens' rows, and the windows and states after them, are in their places."""
        if tokens:
            kv.attach(tokens)
        job.ready_tokens = tokens
        arrived = job.checkpoints
        step = self._layout.prefill_chunk_tokens
        for chunk in range(-(-tokens // step)):
            ends_here = min((chunk + 1) * step, job.num_tokens) == tokens
            job.chunk_ready(chunk, kv.read if ends_here or hit is None else hit.read)
        known = hit.tokens // step if hit is not None else 0
        end = min(len(job.keys), tokens // step)
        if end * step == tokens and end > known and not self._layout.resumable:
            # Its windows and states are overwritten by the next token.
            self._prefix.insert(job.keys, end - 1, kv)
        elif not self._layout.resumable:
            # Rows after the last windows and states that are there would be of no use.
            while end > known and (arrived is None or arrived.reader(end * step) is None):
                end -= 1
        self._snapshots.extend((job, chunk, kv) for chunk in range(known, end))
        if known == end:
            self._drop_arrived(job)

    def _take_snapshot(self) -> bool:
        """Keep one chunk of what arrived from elsewhere: rows stay as they are while others go on."""
        if not self._snapshots:
            return False
        job, chunk, kv = self._snapshots.popleft()
        end = (chunk + 1) * self._layout.prefill_chunk_tokens
        self._prefix.insert(job.keys, chunk, kv, None if job.checkpoints is None else job.checkpoints.reader(end))
        if not any(other is job for other, _, _ in self._snapshots):
            self._drop_arrived(job)
        return True

    @staticmethod
    def _drop_arrived(job: Job) -> None:
        """What arrived for boundaries before the prompt's end is not needed any more. An export keeps its own."""
        if job.checkpoints is None or job.exports_checkpoints:
            return
        if job.hold is not None:
            job.hold.shrink(job.checkpoints.nbytes)
        job.checkpoints = None

    def _next(self) -> Job | None:
        """By priority, then the tenant, then the job that waited longest; now and then by waiting alone."""
        if not self._jobs:
            self._tenant_turns.clear()
            return None
        self._turn += 1
        fair = self._turn % _TURNS_PER_FAIR_TURN == 0

        def order(job: Job) -> tuple[int, int, int, int]:
            if fair:
                return 0, 0, job.last_turn, job.number
            return job.priority, self._tenant_turns.get(job.tenant, 0), job.last_turn, job.number

        job = min(self._jobs, key=order)
        job.last_turn = self._tenant_turns[job.tenant] = self._turn
        return job

    def _compute_chunk(self, job: Job) -> None:
        kv, step = job.kv, self._layout.prefill_chunk_tokens
        assert kv is not None
        start = kv.tokens
        end = min(start + step, job.num_tokens)
        chunk = start // step
        progress = _ChunkProgress(self, job, chunk, end - start)
        begun_s = self._clock.now_s()
        self._executor.prefill(kv, job.prompt[start:end], progress.layer_done)
        job.compute_s += self._clock.now_s() - begun_s - progress.paused_s
        job.computed_tokens += end - start
        job.ready_tokens = end
        self.chunks += 1
        if job.keys:
            self.miss_tokens += end - start
        if chunk < len(job.keys):
            self._prefix.insert(job.keys, chunk, kv)
        job.chunk_ready(chunk, kv.read)

    def interrupt(self, job: Job, layer: int, spent: int) -> float | None:
        """After `spent` layer-tokens: the seconds others took, or None when it is not time yet.

        The last layer ends the step anyway.
        """
        if layer + 1 >= self._layers or spent < self._budget() * self._layers:
            return None
        begun_s = self._clock.now_s()
        try:
            self._pause()
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        if job.cancelled or job.done or job not in self._jobs:
            raise Withdrawn
        return self._clock.now_s() - begun_s


class _ChunkProgress:
    """Follows one chunk through the layers."""

    def __init__(self, turns: PrefillTurns, job: Job, chunk: int, tokens: int) -> None:
        self._turns = turns
        self._job = job
        self._chunk = chunk
        self._tokens = tokens
        self._spent = 0
        self._inside = False
        self.paused_s = 0.0

    def layer_done(self, layer: int) -> None:
        """Let the layer's rows leave, and others work when it is their turn."""
        if self._inside:
            return  # a layer of a decode step that runs in a pause
        self._job.layer_ready(self._chunk, layer)
        self._spent += self._tokens
        self._inside = True
        try:
            paused_s = self._turns.interrupt(self._job, layer, self._spent)
        finally:
            self._inside = False
        if paused_s is not None:
            self._spent = 0
            self.paused_s += paused_s
