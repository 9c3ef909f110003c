"""The sequences being decoded: one token for up to `max_batch` of them a step, in turns when there are more.

Twin of `prefill`: `add`, `drop_done`, `step`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from farfill.engine.choice import Choice
from farfill.engine.executor import Executor
from farfill.engine.jobs import GenerateJob
from farfill.engine.sampling import Logits

_Row = tuple[GenerateJob, Choice]


class DecodeBatch:
    """Choices that go on."""

    def __init__(self, executor: Executor, max_batch: int) -> None:
        self._executor = executor
        self._max_batch = max_batch
        self._rows: deque[_Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def jobs(self) -> tuple[GenerateJob, ...]:
        """The jobs that have choices here, each once."""
        return tuple(dict.fromkeys(job for job, _ in self._rows))

    def add(self, job: GenerateJob, choices: Sequence[Choice]) -> None:
        """Decode `choices` from the next step on."""
        self._rows.extend((job, choice) for choice in choices)

    def drop_done(self) -> None:
        """Forget choices whose job ended."""
        self._rows = deque(row for row in self._rows if not row[0].done)

    def step(self) -> bool:
        """One token for each sequence of the batch; False when there is none. A failure ends one job only."""
        batch = [self._rows.popleft() for _ in range(min(self._max_batch, len(self._rows)))]
        if not batch:
            return False
        for (job, choice), logits in zip(batch, self._compute(batch), strict=True):
            if job.done or logits is None:
                continue
            try:
                event = choice.accept(logits)
                job.emit(event)
            except Exception as error:
                job.fail(error)
                continue
            if event.finish_reason is None:
                self._rows.append((job, choice))
        self.drop_done()
        return True

    def _compute(self, batch: Sequence[_Row]) -> Sequence[Logits | None]:
        """Logits of each row. When the batch fails, rows are tried one by one to find whose fault it is."""
        lengths = [choice.kv.tokens for _, choice in batch]
        try:
            return list(self._executor.decode([(choice.kv, choice.next_token) for _, choice in batch]))
        except Exception as error:
            if len(batch) == 1:
                batch[0][0].fail(error)
                return [None]
        results: list[Logits | None] = []
        for row, tokens in zip(batch, lengths, strict=True):
            row[1].kv.truncate(tokens)
            results.extend(self._compute([row]))
        return results
