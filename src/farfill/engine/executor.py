"""What the scheduler needs from a model: KV memory of one sequence, a prefill step and a decode step.

`engine.local` turns any executor into an `Engine`; `torch` and `fake` implement this file. Calls come from one
thread at a time, except `allocate`, `place` and `read`, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from farfill.core.layout import KVLayout
from farfill.engine.media import MediaInputs


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can do exactly and fast, as found when it was checked; the rest it does exactly and slowly.

    Without `chunked_prefill` every prefill chunk after the first is computed token by token; without `merged_decode`
    the sequences of a batch are decoded one after the other within a step. `remarks` say why, to be logged.
    """

    chunked_prefill: bool = True
    merged_decode: bool = True
    remarks: tuple[str, ...] = field(default=(), compare=False)


class SequenceKV(Protocol):
    """The KV cache of one sequence, with room fixed at allocation.

    `media`: the images of its prompt, set before the first step.
    """

    media: MediaInputs | None

    @property
    def tokens(self) -> int:
        """How many leading tokens' KV is present."""
        ...

    def place(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """The writable place of rows [start, end) of `layout.tensors[tensor]`, before `attach` declares them.

        Of a state: its place, whatever the span.
        """
        ...

    def attach(self, tokens: int) -> None:
        """Declare that the rows of the first `tokens` tokens were written into their places.

        Windows hold exactly the rows before `tokens`, states are those after `tokens` tokens.
        """
        ...

    def read(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """Read-only bytes of present rows; stable until a later token is added (for good, for growing tensors)."""
        ...

    def fork(self) -> SequenceKV:
        """An independent copy with the same room."""
        ...

    def truncate(self, tokens: int) -> None:
        """Forget what a failed decode step may have added; `tokens` is how many there were before it."""
        ...


class Executor(Protocol):
    """A loaded model. Within a step it calls `on_progress` now and then, so that a long step is no silence."""

    on_progress: Callable[[], None]

    @property
    def layout(self) -> KVLayout: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def kv_bytes(self, capacity_tokens: int) -> int:
        """Memory that `allocate(capacity_tokens)` takes."""
        ...

    def allocate(self, capacity_tokens: int, *, dense: bool = False) -> SequenceKV:
        """An empty sequence. `dense`: memory is held for all of it, so it may cost that before it is filled."""
        ...

    def prefill(
        self, kv: SequenceKV, token_ids: Sequence[int], layer_done: Callable[[int], None] | None = None
    ) -> None:
        """Add the KV of one prefill chunk, which starts at `kv.tokens`.

        `layer_done(i)` is called, in order, as soon as this chunk's rows of the growing tensors of decoder layer i
        are final: `kv.read` may read them from then on, although `kv.tokens` counts them only when prefill returns.
        Windows and states are not final before that. What it raises ends the step, and prefill raises it.
        It may call `decode` with other sequences: both steps then compute what they would compute alone.
        """
        ...

    def decode(self, rows: Sequence[tuple[SequenceKV, int]]) -> npt.NDArray[np.float32]:
        """Add one token to each sequence; the logits of what follows, shape (len(rows), vocab_size).

        When it raises, `truncate` makes every sequence what it was.
        """
        ...

    def idle(self) -> None:
        """Nothing is left to do: give memory back that was only kept for speed."""
        ...
