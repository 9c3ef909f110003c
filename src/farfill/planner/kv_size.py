"""How many bytes a prompt's KV is, for any length: in closed form, equal to the manifest both sides derive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Protocol

from farfill.core.layout import DTYPE_BYTES, KVLayout, TensorKind, TensorLayout
from farfill.planner.geometry import Geometry

REPORT_LENGTHS = tuple(1024 * 2**power for power in range(11))  # 1K to 1M tokens
GBIT = 1e9


class KVSize(Protocol):
    """Bytes of KV by prompt length."""

    def bytes_at(self, tokens: float) -> float:
        """Raw bytes of the KV of `tokens` prompt tokens."""
        ...


class LayoutKVSize:
    """The size a layout gives, with equal tensors taken together: it is asked for many lengths."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._per_token = layout.bytes_per_token
        self._states = sum(t.row_bytes for t in layout.tensors if not t.kind.has_rows)
        self._windows = Counter[int]()
        for tensor in layout.tensors:
            if tensor.kind is TensorKind.WINDOW:
                self._windows[tensor.window_tokens] += tensor.row_bytes

    def bytes_at(self, tokens: float) -> float:
        if self._layout.checkpoint_tokens:
            return kv_bytes(self._layout, tokens)
        windows = sum(min(tokens, window) * row for window, row in self._windows.items())
        return tokens * self._per_token + windows + self._states


@dataclass(frozen=True, slots=True)
class MeasuredKVSize:
    """Sizes by length as somebody published them: straight lines between, and beyond the ends."""

    points: tuple[tuple[float, float], ...]

    def bytes_at(self, tokens: float) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        at = next((i for i, point in enumerate(self.points[1:-1], 1) if point[0] >= tokens), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        return max(0.0, y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))


def kv_bytes(layout: KVLayout, tokens: float) -> float:
    """Raw bytes of the KV of `tokens` prompt tokens; a whole number for whole `tokens` (`Manifest.total_bytes`)."""
    total = sum(_rows(tensor, tokens) * tensor.row_bytes for tensor in layout.tensors)
    if layout.checkpoint_tokens:  # windows and states also as they stand at each checkpoint before the end
        others = [t for t in layout.tensors if not t.kind.grows]
        for at in range(layout.checkpoint_tokens, ceil(tokens), layout.checkpoint_tokens):
            total += sum(_rows(tensor, at) * tensor.row_bytes for tensor in others)
    return total


def fixed_bytes(layout: KVLayout) -> int:
    """What does not grow any more once the prompt is longer than every window: states and full windows."""
    return sum(t.row_bytes * max(1, ceil(t.window_tokens / t.row_tokens)) for t in layout.tensors if not t.kind.grows)


def rank_bytes(layout: KVLayout, tokens: float, tensor_parallel: int) -> float:
    """Bytes one of `tensor_parallel` ranks keeps. Heads are split; fewer heads than ranks, and MLA latents, are
    replicated, so that all ranks together hold more than `kv_bytes` (which is what crosses a link)."""
    return sum(_rows(t, tokens) * prod(_rank_shape(t, tensor_parallel)) * DTYPE_BYTES[t.dtype] for t in layout.tensors)


def _rows(tensor: TensorLayout, tokens: float) -> float:
    """Rows of a prompt of `tokens`; an engine that keeps blocks sends whole ones."""
    if not tensor.kind.has_rows:
        return 1
    start = max(0.0, tokens - tensor.window_tokens) if tensor.kind is TensorKind.WINDOW else 0.0
    if tensor.row_tokens == 1:
        return tokens - start
    return ceil(tokens / tensor.row_tokens) - start // tensor.row_tokens


def _rank_shape(tensor: TensorLayout, ranks: int) -> tuple[int, ...]:
    if tensor.kind is TensorKind.LATENT:
        return tensor.row_shape
    return (ceil(tensor.row_shape[0] / ranks), *tensor.row_shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRow:
    """One length. `prefill_s` and `gbit_per_s` (bytes of KV per second of prefill) need a profile."""

    tokens: int
    kv_bytes: int
    dense_bytes: int
    rank_bytes: int
    prefill_s: float | None
    gbit_per_s: float | None

    @property
    def smaller_by(self) -> float:
        """How many times smaller than the dense baseline."""
        return self.dense_bytes / self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReport:
    """What `farfill plan kv` answers. `prefill_source` says where prefill times come from (empty: there are none)."""

    model: str
    model_type: str
    dtypes: tuple[str, ...]
    layers_by_kind: dict[str, int]
    bytes_per_token: int
    fixed_bytes: int
    dense_bytes_per_token: int
    tensor_parallel: int
    prefill_source: str
    rows: tuple[KVRow, ...]


class PrefillTime(Protocol):
    """Seconds of prefill by length, and where they come from."""

    @property
    def source(self) -> str: ...

    def seconds_at(self, tokens: float) -> float:
        """Of one prompt alone."""
        ...


def report_kv(
    model: str,
    geometry: Geometry,
    *,
    lengths: Sequence[int] = REPORT_LENGTHS,
    tensor_parallel: int = 1,
    prefill: PrefillTime | None = None,
) -> KVReport:
    """Sizes at `lengths`, and with `prefill` KV throughput there: size / time, paper arXiv 2604.15039 eq. 1."""
    rows: list[KVRow] = []
    for tokens in lengths:
        size = round(kv_bytes(geometry.layout, tokens))
        seconds = None if prefill is None else prefill.seconds_at(tokens)
        rows.append(
            KVRow(
                tokens=tokens,
                kv_bytes=size,
                dense_bytes=geometry.dense_bytes_per_token * tokens,
                rank_bytes=round(rank_bytes(geometry.layout, tokens, tensor_parallel)),
                prefill_s=seconds,
                gbit_per_s=None if seconds is None else kv_throughput_bits(size, seconds) / GBIT,
            )
        )
    return KVReport(
        model=model,
        model_type=geometry.model_type,
        dtypes=tuple(sorted({f"{_KIND_TEXT[t.kind]} {t.dtype}" for t in geometry.layout.tensors})),
        layers_by_kind=_layers_by_kind(geometry),
        bytes_per_token=geometry.layout.bytes_per_token,
        fixed_bytes=fixed_bytes(geometry.layout),
        dense_bytes_per_token=geometry.dense_bytes_per_token,
        tensor_parallel=tensor_parallel,
        prefill_source="" if prefill is None else prefill.source,
        rows=tuple(rows),
    )


def _layers_by_kind(geometry: Geometry) -> dict[str, int]:
    latent = {t.layer for t in geometry.layout.tensors if t.kind is TensorKind.LATENT}
    words = ("latent" if layer in latent else word for layer, word in enumerate(geometry.layer_words))
    return dict(Counter(words))


_KIND_TEXT = {
    TensorKind.FULL: "full attention",
    TensorKind.LATENT: "latent",
    TensorKind.WINDOW: "window",
    TensorKind.RECURRENT: "recurrent state",
    TensorKind.CONV: "convolution state",
}


def kv_throughput_bits(size_bytes: float, prefill_s: float) -> float:
    """Bits of KV one instance makes per second of prefill (arXiv 2604.15039, eq. 1)."""
    return 8 * size_bytes / prefill_s
