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


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One named tensor of one layer. `row_shape` is one token's shape, or the whole shape of a state."""

    layer: int
    name: str
    kind: TensorKind
    dtype: str
    row_shape: tuple[int, ...]
    window_tokens: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row (or of the whole state)."""
        return prod(self.row_shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All cache tensors of a model in a fixed order, and the prefill chunk both sides compute in."""

    tensors: tuple[TensorLayout, ...]
    prefill_chunk_tokens: int
    version: int = LAYOUT_VERSION

    @property
    def bytes_per_token(self) -> int:
        """Bytes each further token adds for good (windows and states excluded)."""
        return sum(t.row_bytes for t in self.tensors if t.kind.grows)

    @property
    def resumable(self) -> bool:
        """Whether a prefix of prefill chunks alone is enough to continue (no window, no state)."""
        return all(t.kind.grows for t in self.tensors)
