"""The KV cache of one sequence as torch tensors, in the byte layout the transfer speaks.

Growing tensors are token-major buffers with room for the whole sequence: a token range is one contiguous run of
bytes, exported and imported in place, and seen by attention as [1, heads, tokens, dim] through strides. Windows
keep the last W-1 rows (what transformers' DynamicSlidingWindowLayer keeps) in a buffer with some slack, so that
a decode step appends and only sometimes shifts. With `staged`, tensors live on another device and bytes pass
through host buffers instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.memory import allocate_bytes

WINDOW_SLACK_TOKENS = 64
_ALIGN_BYTES = 64


class KVSpec:
    """A layout's tensors in pairs (k, v), one pair a layer, and where each lies in a sequence's buffer."""

    def __init__(self, layout: KVLayout, device: torch.device, *, staged: bool | None = None) -> None:
        self.layout = layout
        self.device = device
        self.staged = device.type != "cpu" if staged is None else staged

    def rows(self, tensor: TensorLayout, capacity_tokens: int) -> int:
        """Rows a tensor's buffer has."""
        if tensor.kind is TensorKind.WINDOW:
            return min(capacity_tokens, tensor.window_tokens + WINDOW_SLACK_TOKENS)
        return capacity_tokens

    def spans(self, capacity_tokens: int) -> list[tuple[int, int]]:
        """(offset, bytes) of each tensor in one sequence's buffer."""
        spans: list[tuple[int, int]] = []
        offset = 0
        for tensor in self.layout.tensors:
            nbytes = self.rows(tensor, capacity_tokens) * tensor.row_bytes
            spans.append((offset, nbytes))
            offset += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return spans

    def kv_bytes(self, capacity_tokens: int) -> int:
        """Bytes of one sequence's buffer."""
        offset, nbytes = self.spans(capacity_tokens)[-1]
        return offset + nbytes


class _RowsLayer(CacheLayerMixin, ABC):
    """k and v of one layer in buffers [rows, heads, dim]; `length` tokens were seen so far."""

    def __init__(self, key_rows: torch.Tensor, value_rows: torch.Tensor) -> None:
        super().__init__()
        self.key_rows = key_rows
        self.value_rows = value_rows
        # Views made once: a decode step of a small model is mostly the cost of such calls.
        self._all_keys = key_rows.transpose(0, 1).unsqueeze(0)
        self._all_values = value_rows.transpose(0, 1).unsqueeze(0)
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Buffers exist from the start."""

    def get_seq_length(self) -> int:
        """Tokens so far, kept or not."""
        return self.length

    @abstractmethod
    def span(self, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        """Buffer rows of tokens [start, end); `attached`: they are there, otherwise where they are to go."""

    @abstractmethod
    def attach(self, tokens: int) -> None:
        """What is kept of the first `tokens` tokens is in its place."""

    def truncate(self, tokens: int) -> None:
        """Forget the tokens after the first `tokens`; those before are all still there after one step."""
        self.length = tokens

    def _write(self, row: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._all_keys.narrow(2, row, key_states.shape[-2]).copy_(key_states)
        self._all_values.narrow(2, row, value_states.shape[-2]).copy_(value_states)

    def _seen(self, row: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._all_keys.narrow(2, row, count), self._all_values.narrow(2, row, count)


class FullLayer(_RowsLayer):
    """Keeps every token."""

    is_sliding = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, q, dim]; all tokens so far, in the same shape."""
        self._write(self.length, key_states, value_states)
        self.length += key_states.shape[-2]
        return self._seen(0, self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys seen by the next step, position of the first)."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No bound of its own."""
        return -1

    def span(self, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        """Row i is token i."""
        return start_token, end_token

    def attach(self, tokens: int) -> None:
        """Rows [0, tokens) are in their places."""
        self.length = tokens


class WindowLayer(_RowsLayer):
    """Keeps the last `window` tokens, and some before them; row 0 of the buffer is token `base`."""

    is_sliding = True

    def __init__(self, key_rows: torch.Tensor, value_rows: torch.Tensor, window: int) -> None:
        super().__init__(key_rows, value_rows)
        self.window = window
        self.base = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, q, dim]; the window before them and they, in the same shape."""
        new, rows = key_states.shape[-2], self.key_rows.shape[0]
        first = max(self.base, self.length - self.window)
        seen = self.length - first
        if seen + new > rows:
            return self._replace(key_states, value_states, first, seen)
        if self.length + new - self.base > rows:
            self._shift(first, seen)
        self._write(self.length - self.base, key_states, value_states)
        self.length += new
        return self._seen(first - self.base, seen + new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys seen by the next step, position of the first)."""
        seen = min(self.length, self.window)
        return seen + query_length, self.length - seen

    def get_max_length(self) -> int:
        """Tokens a step may look at, its own included."""
        return self.window + 1

    def span(self, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        """Buffer rows of tokens [start, end); before anything is attached, the window goes to row 0."""
        base = self.base if attached else start_token
        return start_token - base, end_token - base

    def attach(self, tokens: int) -> None:
        """The window before token `tokens` is in its place."""
        self.length = tokens
        self.base = max(0, tokens - self.window)

    def _shift(self, first: int, seen: int) -> None:
        """Move the window to the buffer's start."""
        at = first - self.base
        for rows in (self.key_rows, self.value_rows):
            # The runs overlap when the slack is smaller than the window.
            rows[:seen] = rows[at : at + seen].clone()
        self.base = first

    def _replace(
        self, key_states: torch.Tensor, value_states: torch.Tensor, first: int, seen: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append more than the buffer holds: attention sees all of it, the buffer keeps the end."""
        old_keys, old_values = self._seen(first - self.base, seen)
        keys = torch.cat([old_keys, key_states], dim=2)
        values = torch.cat([old_values, value_states], dim=2)
        kept = min(self.window, keys.shape[2])
        self.length += key_states.shape[-2]
        self.base = self.length - kept
        self._write(0, keys[:, :, -kept:], values[:, :, -kept:])
        return keys, values


Layer = FullLayer | WindowLayer


class TorchKV(Cache):
    """Implements `engine.executor.SequenceKV`, and is the `cache=` of one sequence for transformers' models."""

    def __init__(self, spec: KVSpec, capacity_tokens: int) -> None:
        self._spec = spec
        self._capacity_tokens = capacity_tokens
        self._tokens = 0
        self._spans = spec.spans(capacity_tokens)
        self._host: npt.NDArray[np.uint8] | None = None
        nbytes = spec.kv_bytes(capacity_tokens)
        if spec.staged:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=spec.device)
        else:
            self._host = allocate_bytes(nbytes)
            self._bytes = torch.from_numpy(self._host)
        super().__init__(layers=self._make_layers())  # type: ignore[arg-type]

    @property
    def tokens(self) -> int:
        """How many leading tokens' KV is present."""
        return self._tokens

    def advance(self, tokens: int) -> None:
        """A step is over that added `tokens` tokens to every layer."""
        self._tokens += tokens

    def layer(self, index: int) -> Layer:
        """Layer `index`, by its own type."""
        layer = self.layers[index]
        assert isinstance(layer, (FullLayer, WindowLayer))
        return layer

    def place(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """The writable place of rows [start, end), before `attach` declares them."""
        first, last = self._byte_span(tensor, start_token, end_token, attached=False)
        return self._host_buffer().data[first:last]

    def read(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """Read-only bytes of present rows."""
        first, last = self._byte_span(tensor, start_token, end_token, attached=True)
        host = self._host_buffer()
        if self._spec.staged:
            torch.from_numpy(host[first:last]).copy_(self._bytes[first:last])
        return host.data[first:last].toreadonly()

    def attach(self, tokens: int) -> None:
        """Declare that the rows of the first `tokens` tokens were written into their places."""
        for index, tensor in enumerate(self._spec.layout.tensors):
            if self._spec.staged and tokens:
                start = 0 if tensor.kind.grows else max(0, tokens - tensor.window_tokens)
                first, last = self._byte_span(index, start, tokens, attached=False)
                self._bytes[first:last].copy_(torch.from_numpy(self._host_buffer()[first:last]))
        for index in range(len(self.layers)):
            self.layer(index).attach(tokens)
        self._tokens = tokens

    def fork(self) -> TorchKV:
        """An independent copy with the same room."""
        copy = TorchKV(self._spec, self._capacity_tokens)
        copy._bytes.copy_(self._bytes)
        copy._tokens = self._tokens
        for index in range(len(self.layers)):
            mine, other = self.layer(index), copy.layer(index)
            other.length = mine.length
            if isinstance(mine, WindowLayer) and isinstance(other, WindowLayer):
                other.base = mine.base
        return copy

    def truncate(self, tokens: int) -> None:
        """Forget what one failed step may have added after the first `tokens` tokens."""
        for index in range(len(self.layers)):
            self.layer(index).truncate(tokens)
        self._tokens = tokens

    def _host_buffer(self) -> npt.NDArray[np.uint8]:
        if self._host is None:
            self._host = allocate_bytes(self._bytes.numel())
        return self._host

    def _byte_span(self, tensor: int, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        layer = self.layer(tensor // 2)
        # An empty sequence has no window yet, so its place is where one is going to be attached.
        first, last = layer.span(start_token, end_token, attached=attached and layer.length > 0)
        offset, row = self._spans[tensor][0], self._spec.layout.tensors[tensor].row_bytes
        return offset + first * row, offset + last * row

    def _make_layers(self) -> Sequence[Layer]:
        tensors = self._spec.layout.tensors
        layers: list[Layer] = []
        for index in range(0, len(tensors), 2):
            keys, values = self._rows(index), self._rows(index + 1)
            if tensors[index].kind is TensorKind.WINDOW:
                layers.append(WindowLayer(keys, values, tensors[index].window_tokens))
            else:
                layers.append(FullLayer(keys, values))
        return layers

    def _rows(self, index: int) -> torch.Tensor:
        """The buffer of one tensor as [rows, heads, dim]."""
        tensor, (offset, nbytes) = self._spec.layout.tensors[index], self._spans[index]
        rows = self._spec.rows(tensor, self._capacity_tokens)
        return self._bytes[offset : offset + nbytes].view(getattr(torch, tensor.dtype)).view(rows, *tensor.row_shape)
