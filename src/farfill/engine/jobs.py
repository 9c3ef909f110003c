"""One request inside the engine: a prompt on its way to KV, then its choices. Owned by the engine thread.

`cancel` and `release` may be called from any thread; they set a flag, wake the scheduler and leave the rest to it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from farfill.core.errors import CancelledWorkError, EngineError, FarfillError
from farfill.engine.checkpoints import Checkpoints, ReadState
from farfill.engine.choice import Choice
from farfill.engine.executor import SequenceKV
from farfill.engine.memory import Hold
from farfill.engine.output import Vocabulary
from farfill.engine.prefix import PrefixHit
from farfill.engine.protocol import GenerateWork, PrefillSink, PrefillStats, PrefillWork, TokenEvent, TokenSink
from farfill.kv.manifest import Manifest, Piece

_log = logging.getLogger(__name__)

# A sequence that was set back has no KV until its prompt is there again.
_NO_KV = cast("SequenceKV", None)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job takes: decode rows, the room of one sequence, and the KV memory of that.

    Memory is taken for `first_tokens` of a row when it starts and, when that is less than `capacity_tokens`, for
    more as the output grows. `checkpoint_bytes` come on top.
    """

    rows: int
    capacity_tokens: int
    first_tokens: int
    kv_bytes: Callable[[int], int]
    checkpoint_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether memory for all of it is held from the start."""
        return self.first_tokens == self.capacity_tokens

    @property
    def bytes_per_row(self) -> int:
        """KV memory of one row at its start."""
        return self.kv_bytes(self.first_tokens)

    @property
    def first_bytes(self) -> int:
        """KV memory of the whole job at its start."""
        return self.rows * self.bytes_per_row + self.checkpoint_bytes

    @property
    def most_bytes(self) -> int:
        """KV memory of the whole job at its end."""
        return self.rows * self.kv_bytes(self.capacity_tokens) + self.checkpoint_bytes


@dataclass(slots=True, eq=False)
class Row:
    """A choice being decoded. `replay` are tokens to be computed again, which the choice gave out before."""

    job: GenerateJob
    choice: Choice
    outputs: list[int] = field(default_factory=list[int])
    replay: deque[int] = field(default_factory=deque[int])

    @property
    def next_token(self) -> int:
        """What the next step adds to the KV."""
        return self.replay[0] if self.replay else self.choice.next_token

    def restart(self, kv: SequenceKV) -> None:
        """Go on with `kv`, which ends before the last prompt token."""
        self.choice.kv = kv
        if self.outputs:
            self.replay = deque([self.job.prompt[-1], *self.outputs[:-1]])


class Job(ABC):
    """What prefill and generation have in common. `prompt[:num_tokens]` is what prefill computes."""

    def __init__(
        self,
        work: PrefillWork | GenerateWork,
        *,
        keys: tuple[bytes, ...],
        demand: Demand,
        wake: Callable[[], None],
    ) -> None:
        self.request_id = work.request_id
        self.prompt = work.prompt
        self.priority = work.priority
        self.tenant = work.tenant
        self.media_inputs = work.media_inputs
        self.num_tokens = len(work.prompt) - 1
        self.keys = keys
        self.demand = demand
        self.number = 0
        self.kv: SequenceKV | None = None
        self.hold: Hold | None = None
        self.hit: PrefixHit | None = None
        self.checkpoints: Checkpoints | None = None
        self.valid_tokens = 0
        self.ready_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.compute_s = 0.0
        self.submitted_s = 0.0
        self.started_s = 0.0
        self.started = False
        self.charged = False
        self.last_turn = 0
        self.cancelled = False
        self.done = False
        self._open_rows = demand.rows
        self._wake = wake

    @property
    def live(self) -> bool:
        """Whether it may hold KV memory."""
        return not self.done

    @property
    def filled_tokens(self) -> int:
        """Tokens each of its sequences has KV of."""
        kv = self.kv
        return 0 if kv is None else kv.tokens

    @property
    def filled_bytes(self) -> int:
        """Bytes of its hold that have KV of tokens in them by now."""
        tokens = self.filled_tokens
        return self._open_rows * self.demand.kv_bytes(tokens) if tokens else 0

    @property
    def open_rows(self) -> int:
        """Sequences it still waits with or runs."""
        return 0 if self.done else self._open_rows

    @property
    def uncomputed_tokens(self) -> int:
        """Prompt tokens not there yet."""
        return 0 if self.done else max(0, self.num_tokens - self.ready_tokens)

    @property
    def exports_checkpoints(self) -> bool:
        """Whether windows and states are wanted as they were at every checkpoint."""
        return False

    @property
    def memory_wanted(self) -> int:
        """KV bytes to take before it starts."""
        return self.demand.first_bytes

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

    def layer_ready(self, chunk: int, layer: int) -> None:  # noqa: B027 (likewise)
        """The rows of prefill chunk `chunk` are final in the growing tensors of one layer."""

    def chunk_ready(self, chunk: int, read_state: ReadState) -> None:  # noqa: B027 (likewise)
        """All KV of a prefill chunk is final; `read_state` gives windows and states as they are at its end."""

    @abstractmethod
    def prompt_ready(self) -> Sequence[Row]:
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
        self.kv = self.checkpoints = None
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
        super().__init__(work, keys=keys, demand=demand, wake=wake)
        self.manifest = manifest
        self._sink = sink
        self._offered = bytearray(len(manifest.pieces))
        self._released = False

    @property
    def live(self) -> bool:
        """An export holds its KV until it is released."""
        return not (self.done and self._released)

    @property
    def exports_checkpoints(self) -> bool:
        return bool(self.manifest.checkpoint_pieces)

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

    def layer_ready(self, chunk: int, layer: int) -> None:
        tensors = self.manifest.layout.tensors
        group = self.manifest.by_prefill_chunk[chunk]
        self._offer([p for p in group if tensors[p.tensor].layer == layer and tensors[p.tensor].kind.grows])

    def chunk_ready(self, chunk: int, read_state: ReadState) -> None:
        if self.exports_checkpoints:
            if self.checkpoints is None:
                self.checkpoints = Checkpoints(self.manifest)
            self.checkpoints.capture(chunk, read_state)
        self._offer(self.manifest.by_prefill_chunk[chunk])

    def prompt_ready(self) -> Sequence[Row]:
        self._sink.finished(self.stats)
        self.done = True
        if self._released:
            self.free()
        return ()

    def tell_failed(self, error: Exception) -> None:
        self._sink.failed(error)

    def _offer(self, pieces: Sequence[Piece]) -> None:
        """Tell the sink of those it has not heard of."""
        new = [piece for piece in pieces if not self._offered[piece.index]]
        if not new:
            return
        for piece in new:
            self._offered[piece.index] = 1
        self._sink.pieces_ready([(piece.index, self._bytes(piece)) for piece in new])

    def _bytes(self, piece: Piece) -> memoryview:
        assert self.kv is not None
        kept = self.checkpoints.buffer(piece.index) if self.checkpoints is not None else None
        if kept is not None:
            return kept.toreadonly()
        return self.kv.read(piece.tensor, piece.start_token, piece.end_token)


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
        super().__init__(work, keys=keys, demand=demand, wake=wake)
        self._sampling = work.sampling
        self._sink = sink
        self._vocabulary = vocabulary
        self._rows: list[Row] = []
        self._told = False
        # Tokens of each row's KV that memory is held for.
        self.covered_tokens = demand.first_tokens

    @property
    def filled_tokens(self) -> int:
        kv = self.kv
        if kv is not None:
            return kv.tokens
        sequences = [row.choice.kv for row in self._rows]
        return max((sequence.tokens for sequence in sequences if sequence is not _NO_KV), default=0)

    @property
    def memory_wanted(self) -> int:
        """What was given out already is computed again and needs its room from the start."""
        if not self._rows:
            return self.demand.first_bytes
        return self._open_rows * self.demand.kv_bytes(self._first_tokens())

    def prompt_ready(self) -> Sequence[Row]:
        kv = self.kv
        assert kv is not None
        rows = [row for row in self._rows if row.choice.kv is _NO_KV] or self._make_rows()
        copies = [kv, *(kv.fork() for _ in rows[1:])]
        self.kv = None
        for row, copy in zip(rows, copies, strict=True):
            row.restart(copy)
        if not self._told:
            self._told = True
            self._sink.prefilled(self.stats)
        return rows

    def emit(self, event: TokenEvent) -> None:
        """Pass one choice's event on; the last choice to finish ends the job."""
        if event.finish_reason is not None:
            self._rows = [row for row in self._rows if row.choice.index != event.index]
            self._open_rows -= 1
            if self.hold is not None:
                self.hold.shrink(self.demand.bytes_per_row)
            if self._open_rows == 0:
                self.done = True
                self.free()
        self._sink.token(event)

    def set_back(self) -> None:
        """Give all memory back and wait again; what was given out is computed again, nothing is chosen anew."""
        self.free()
        self.hold = self.hit = None
        for row in self._rows:
            row.choice.kv = _NO_KV
            row.replay.clear()
        self.valid_tokens = self.ready_tokens = 0
        self.cached_tokens = self.computed_tokens = 0
        self.covered_tokens = self._first_tokens()
        self.started = False

    def free(self) -> None:
        super().free()
        if self.done:
            # Whoever still knows the job must not keep its KV.
            self._rows = []

    def tell_failed(self, error: Exception) -> None:
        self._sink.failed(error)

    def _first_tokens(self) -> int:
        given = max((len(row.outputs) for row in self._rows), default=0)
        return min(self.demand.capacity_tokens, self.demand.first_tokens + given)

    def _make_rows(self) -> list[Row]:
        # The last prompt token is one, and every output token but the last is added to the KV.
        max_tokens = self.demand.capacity_tokens - self.num_tokens
        self._rows = [
            Row(
                self,
                Choice(
                    index,
                    _NO_KV,
                    self.prompt,
                    params=self._sampling,
                    vocabulary=self._vocabulary,
                    max_tokens=max_tokens,
                ),
            )
            for index in range(self.demand.rows)
        ]
        return self._rows
