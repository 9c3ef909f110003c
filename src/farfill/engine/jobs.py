"""One request inside the engine: a prompt on its way to KV, then its choices. Owned by the engine thread.

`cancel` and `release` may be called from any thread; they set a flag, wake the scheduler and leave the rest to it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farfill.core.errors import CancelledWorkError, EngineError, FarfillError
from farfill.engine.choice import Choice
from farfill.engine.executor import SequenceKV
from farfill.engine.memory import Hold
from farfill.engine.output import Vocabulary
from farfill.engine.prefix import PrefixHit
from farfill.engine.protocol import GenerateWork, PrefillSink, PrefillStats, PrefillWork, TokenEvent, TokenSink
from farfill.kv.manifest import Manifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job takes: decode rows, KV bytes of each, and the room of one sequence."""

    rows: int
    bytes_per_row: int
    capacity_tokens: int

    @property
    def nbytes(self) -> int:
        """KV memory of the whole job."""
        return self.rows * self.bytes_per_row


class Job(ABC):
    """What prefill and generation have in common. `prompt[:num_tokens]` is what prefill computes."""

    def __init__(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        keys: tuple[bytes, ...],
        demand: Demand,
        wake: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.num_tokens = len(prompt) - 1
        self.keys = keys
        self.demand = demand
        self.kv: SequenceKV | None = None
        self.hold: Hold | None = None
        self.hit: PrefixHit | None = None
        self.valid_tokens = 0
        self.ready_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.compute_s = 0.0
        self.submitted_s = 0.0
        self.started_s = 0.0
        self.started = False
        self.cancelled = False
        self.done = False
        self._open_rows = demand.rows
        self._wake = wake

    @property
    def live(self) -> bool:
        """Whether it may hold KV memory."""
        return not self.done

    @property
    def open_rows(self) -> int:
        """Sequences it still waits with or runs."""
        return 0 if self.done else self._open_rows

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens not there yet."""
        return 0 if self.done else max(0, self.num_tokens - self.ready_tokens)

    @property
    def stats(self) -> PrefillStats:
        """How the prompt was prefilled, so far."""
        return PrefillStats(
            queued_s=self.started_s - self.submitted_s,
            compute_s=self.compute_s,
            computed_tokens=self.computed_tokens,
            cached_tokens=self.cached_tokens,
        )

    def cancel(self) -> None:
        """Withdraw the work; idempotent, from any thread."""
        self.cancelled = True
        self._wake()

    def step_done(self) -> None:  # noqa: B027 (only an export wants to hear it)
        """The engine finished a step, maybe another job's."""

    def chunks_ready(self, first: int, end: int) -> None:  # noqa: B027 (likewise)
        """The KV of prefill chunks [first, end) is complete."""

    @abstractmethod
    def prompt_ready(self) -> Sequence[Choice]:
        """The KV of the whole prompt is complete: what to decode now."""

    @abstractmethod
    def tell_failed(self, error: Exception) -> None:
        """Pass `error` to the sink."""

    def fail(self, error: Exception) -> None:
        """End with `error`, at most once, and give everything back."""
        if self.done:
            return
        self.done = True
        self.free()
        if not isinstance(error, FarfillError):
            _log.error("request %s failed in the engine", self.request_id, exc_info=error)
            cause, error = error, EngineError(f"{type(error).__name__}: {error}")
            error.__cause__ = cause
        try:
            self.tell_failed(error)
        except Exception:
            _log.exception("the sink of request %s raised on failed()", self.request_id)

    def fail_cancelled(self) -> None:
        """End because the caller left."""
        self.fail(CancelledWorkError(f"request {self.request_id} was cancelled"))

    def free(self) -> None:
        """Give KV memory and pins back. Idempotent, from any thread."""
        self.kv = None
        if self.hold is not None:
            self.hold.release()
        if self.hit is not None:
            self.hit.release()


class PrefillJob(Job):
    """A prefill whose KV is exported; it is its own `PrefillHandle`."""

    def __init__(
        self,
        work: PrefillWork,
        sink: PrefillSink,
        *,
        manifest: Manifest,
        keys: tuple[bytes, ...],
        demand: Demand,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(work.request_id, work.prompt, keys, demand, wake)
        self.manifest = manifest
        self._sink = sink
        self._released = False

    @property
    def live(self) -> bool:
        """An export holds its KV until it is released."""
        return not (self.done and self._released)

    def release(self) -> None:
        """Let the KV go; withdraws the work when it still runs. Idempotent, from any thread."""
        # Both sides set their flag before they look at the other's, so one of them frees.
        self._released = True
        if self.done:
            self.free()
        else:
            self.cancel()

    def step_done(self) -> None:
        self._sink.progress()

    def chunks_ready(self, first: int, end: int) -> None:
        kv = self.kv
        assert kv is not None
        pieces = [piece for group in self.manifest.by_prefill_chunk[first:end] for piece in group]
        self._sink.pieces_ready([(p.index, kv.read(p.tensor, p.start_token, p.end_token)) for p in pieces])

    def prompt_ready(self) -> Sequence[Choice]:
        self._sink.finished(self.stats)
        self.done = True
        if self._released:
            self.free()
        return ()

    def tell_failed(self, error: Exception) -> None:
        self._sink.failed(error)


class GenerateJob(Job):
    """A generation: one prompt, `sampling.n` choices."""

    def __init__(
        self,
        work: GenerateWork,
        sink: TokenSink,
        *,
        vocabulary: Vocabulary,
        keys: tuple[bytes, ...],
        demand: Demand,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(work.request_id, work.prompt, keys, demand, wake)
        self._sampling = work.sampling
        self._sink = sink
        self._vocabulary = vocabulary

    def prompt_ready(self) -> Sequence[Choice]:
        kv = self.kv
        assert kv is not None
        # The last prompt token is one, and every output token but the last is added to the KV.
        max_tokens = self.demand.capacity_tokens - self.num_tokens
        copies = [kv, *(kv.fork() for _ in range(self.demand.rows - 1))]
        self.kv = None
        self._sink.prefilled(self.stats)
        return [
            Choice(index, copy, self.prompt, params=self._sampling, vocabulary=self._vocabulary, max_tokens=max_tokens)
            for index, copy in enumerate(copies)
        ]

    def emit(self, event: TokenEvent) -> None:
        """Pass one choice's event on; the last choice to finish ends the job."""
        if event.finish_reason is not None:
            self._open_rows -= 1
            if self.hold is not None:
                self.hold.shrink(self.demand.bytes_per_row)
            if self._open_rows == 0:
                self.done = True
                self.free()
        self._sink.token(event)

    def tell_failed(self, error: Exception) -> None:
        self._sink.failed(error)
