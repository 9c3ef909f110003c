"""What a model's KV cache consists of, as both sides of a link must agree on it.

A tensor that grows with tokens is stored token-major: the bytes of tokens [a, b) are one contiguous C-order
array of shape (b - a, *row_shape). A state tensor (recurrent, conv) is one array of shape `row_shape`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

LAYOUT_VERSION = 1

DTYPE_BYTES: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}


class TensorKind(StrEnum):
    """How a cache tensor behaves as the prompt grows."""

    FULL = "full"  # one row per token, all kept
    LATENT = "latent"  # one row per token, all kept, compressed (MLA)
    WINDOW = "window"  # one row per token, the last `window_tokens` kept
    RECURRENT = "recurrent"  # fixed size, rewritten by every token
    CONV = "conv"  # fixed size, the last inputs of a short convolution

    @property
    def grows(self) -> bool:
        """Whether every token adds a row that stays (so ranges can stream while prefill runs)."""
        return self in (TensorKind.FULL, TensorKind.LATENT)

    @property
    def has_rows(self) -> bool:
        """Whether it has one row per token, kept or not; otherwise it is one array of a fixed size."""
        return self.grows or self is TensorKind.WINDOW


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One named tensor of one layer. `row_shape` is one token's shape, or the whole shape of a state.

    An engine that keeps blocks moves whole blocks: a row then holds `row_tokens` tokens.
    """

    layer: int
    name: str
    kind: TensorKind
    dtype: str
    row_shape: tuple[int, ...]
    window_tokens: int = 0
    row_tokens: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (or of the whole state)."""
        return prod(self.row_shape) * DTYPE_BYTES[self.dtype]

    def rows(self, start_token: int, end_token: int) -> int:
        """Rows that hold tokens [start, end); 1 for a state."""
        if not self.kind.has_rows:
            return 1
        return -(-end_token // self.row_tokens) - start_token // self.row_tokens


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All cache tensors of a model in a fixed order, and the prefill chunk both sides compute in.

    Every `checkpoint_every_chunks` prefill chunks, windows and states are exported as they are there (0: only at the
    end of the prompt), so that a prompt can be continued from a boundary it was interrupted after.
    """

    tensors: tuple[TensorLayout, ...]
    prefill_chunk_tokens: int
    checkpoint_every_chunks: int = 0
    version: int = LAYOUT_VERSION

    @property
    def bytes_per_token(self) -> int:
        """Bytes each further token adds for good (windows and states excluded), on average over a row."""
        return sum(-(-t.row_bytes // t.row_tokens) for t in self.tensors if t.kind.grows)

    @property
    def resumable(self) -> bool:
        """Whether a prefix of prefill chunks alone is enough to continue (no window, no state)."""
        return all(t.kind.grows for t in self.tensors)

    @property
    def checkpoint_tokens(self) -> int:
        """Tokens from one checkpoint to the next; 0 when there are none, or nothing that needs them."""
        return 0 if self.resumable else self.checkpoint_every_chunks * self.prefill_chunk_tokens

    def can_continue_at(self, tokens: int) -> bool:
        """Whether the pieces of the first `tokens` tokens, which do not end the prompt, are enough to continue."""
        step = self.prefill_chunk_tokens if self.resumable else self.checkpoint_tokens
        return step > 0 and tokens % step == 0

    def kept_span(self, tensor: int, tokens: int) -> tuple[int, int]:
        """[start, end) of what a window or state keeps after `tokens` tokens; empty for states."""
        layout = self.tensors[tensor]
        start = max(0, tokens - layout.window_tokens) if layout.kind is TensorKind.WINDOW else tokens
        return start, tokens
