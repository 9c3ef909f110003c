"""The sequences being decoded: one token for up to `max_batch` of them a step, in turns when there are more.

Twin of `prefill`: `add`, `drop_done`, `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from farfill.engine.executor import Executor
from farfill.engine.jobs import GenerateJob, Row
from farfill.engine.sampling import Logits


class DecodeBatch:
    """Choices that go on. `has_room(job)` says whether there is memory for one more token of each of its rows."""

    def __init__(self, executor: Executor, max_batch: int, has_room: Callable[[GenerateJob], bool]) -> None:
        self._executor = executor
        self._max_batch = max_batch
        self._has_room = has_room
        self._rows: deque[Row] = deque()
        self.steps = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows_in_step(self) -> int:
        """Tokens the next step adds."""
        return min(self._max_batch, len(self._rows))

    @property
    def jobs(self) -> tuple[GenerateJob, ...]:
        """The jobs that have choices here, each once."""
        return tuple(dict.fromkeys(row.job for row in self._rows))

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return tuple(self._rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Decode `rows` from the next step on."""
        self._rows.extend(rows)

    def drop_done(self) -> None:
        """Forget choices whose job ended."""
        self._rows = deque(row for row in self._rows if not row.job.done)

    def remove(self, job: GenerateJob) -> None:
        """Forget a job's choices."""
        self._rows = deque(row for row in self._rows if row.job is not job)

    def step(self) -> bool:
        """One token for each sequence of the batch; False when there is none. A failure ends one job only."""
        batch = self._take_batch()
        if not batch:
            return False
        self.steps += 1
        for row, logits in zip(batch, self._compute(batch), strict=True):
            if not row.job.done and logits is not None and self._advance(row, logits):
                self._rows.append(row)
        self.drop_done()
        return True

    def _take_batch(self) -> list[Row]:
        """The next rows in turn that have room; looking for room may take a job out of here."""
        without_room = {job for job in self.jobs if not self._has_room(job)}
        batch: list[Row] = []
        waiting: list[Row] = []
        while self._rows and len(batch) < self._max_batch:
            row = self._rows.popleft()
            (waiting if row.job in without_room else batch).append(row)
        self._rows.extendleft(reversed(waiting))
        return batch

    @staticmethod
    def _advance(row: Row, logits: Logits) -> bool:
        """Choose the next token and pass it on; whether the choice goes on."""
        if row.replay:
            row.replay.popleft()
            return True
        try:
            event = row.choice.accept(logits)
            row.outputs.append(row.choice.next_token)
            row.job.emit(event)
        except Exception as error:
            row.job.fail(error)
            return False
        return event.finish_reason is None

    def _compute(self, batch: Sequence[Row]) -> Sequence[Logits | None]:
        """Logits of each row. When the batch fails, rows are tried one by one to find whose fault it is."""
        lengths = [row.choice.kv.tokens for row in batch]
        try:
            return list(self._executor.decode([(row.choice.kv, row.next_token) for row in batch]))
        except Exception as error:
            if len(batch) == 1:
                batch[0].job.fail(error)
                return [None]
        results: list[Logits | None] = []
        for row, tokens in zip(batch, lengths, strict=True):
            row.choice.kv.truncate(tokens)
            results.extend(self._compute([row]))
        return results
