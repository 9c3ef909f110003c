"""The KV cache of one sequence as torch tensors, in the byte layout the transfer speaks.

One buffer holds every tensor: rows of attention layers with room for the whole sequence (see `rows`), and states of
recurrent and convolution layers, one array each. Byte ranges are exported and imported in place. A step never writes
a state here: it works on copies (see `step`) that are written back when it succeeded. With `staged`, tensors live on
another device and bytes pass through a host buffer instead (see `staging`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.media import MediaInputs
from farfill.engine.memory import allocate_bytes
from farfill.engine.torch.rows import WINDOW_SLACK_TOKENS, FullRows, Rows, WindowRows
from farfill.engine.torch.staging import HostMirror

_ALIGN_BYTES = 64

KEYS, VALUES = "k", "v"


class KVSpec:
    """Where each tensor of a layout lies in a sequence's buffer.

    `num_layers` counts the model's layers, those that keep nothing included. In `chunked` layers a token looks back
    only to the start of its own run of window + 1 tokens (Llama 4).
    """

    def __init__(
        self,
        layout: KVLayout,
        device: torch.device,
        *,
        num_layers: int | None = None,
        chunked: frozenset[int] = frozenset(),
        staged: bool | None = None,
    ) -> None:
        self.layout = layout
        self.device = device
        self.staged = device.type != "cpu" if staged is None else staged
        self.num_layers = num_layers or 1 + max(tensor.layer for tensor in layout.tensors)
        self.chunked = chunked
        self._state_bytes = sum(t.row_bytes for t in layout.tensors if is_state(t))

    def rows(self, tensor: TensorLayout, capacity_tokens: int) -> int:
        """Rows a tensor's buffer has; a state is one."""
        if is_state(tensor):
            return 1
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

    def buffer_bytes(self, capacity_tokens: int) -> int:
        """Bytes of one sequence's buffer."""
        offset, nbytes = self.spans(capacity_tokens)[-1]
        return offset + nbytes

    def kv_bytes(self, capacity_tokens: int) -> int:
        """What one sequence takes at most: its buffer, and the copy of its states while a step runs."""
        return self.buffer_bytes(capacity_tokens) + self._state_bytes


def is_state(tensor: TensorLayout) -> bool:
    """Whether `tensor` is one array that every token rewrites."""
    return tensor.kind in (TensorKind.RECURRENT, TensorKind.CONV)


@dataclass(slots=True)
class LayerKV:
    """What one layer of one sequence keeps. States by their number in the layer, as [1, *shape]."""

    rows: Rows | None = None
    conv: dict[int, torch.Tensor] = field(default_factory=dict)
    recurrent: dict[int, torch.Tensor] = field(default_factory=dict)


class TorchKV:
    """Implements `engine.executor.SequenceKV`, in memory of its own or in `buffer` (host memory)."""

    def __init__(
        self, spec: KVSpec, capacity_tokens: int, *, dense: bool = False, buffer: npt.NDArray[np.uint8] | None = None
    ) -> None:
        self.spec = spec
        self.tokens = 0
        self.media: MediaInputs | None = None
        self._capacity_tokens = capacity_tokens
        self._spans = spec.spans(capacity_tokens)
        nbytes = spec.buffer_bytes(capacity_tokens)
        self._mirror: HostMirror | None = None
        if spec.staged:
            self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=spec.device)
            self._mirror = HostMirror(self._bytes)
        else:
            self._host = allocate_bytes(nbytes, dense=dense) if buffer is None else buffer
            self._bytes = torch.from_numpy(self._host)
        self.layers = self._make_layers()

    def place(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """The writable place of rows [start, end) or of a whole state, before `attach` declares them."""
        first, last = self._byte_span(tensor, start_token, end_token, attached=False)
        return self._host_bytes(first, last)

    def read(self, tensor: int, start_token: int, end_token: int) -> memoryview:
        """Read-only bytes of present rows, or of a whole state as it is after `tokens` tokens."""
        first, last = self._byte_span(tensor, start_token, end_token, attached=True)
        if self._mirror is not None:
            self._mirror.fetch(first, last)
        return self._host_bytes(first, last).toreadonly()

    def stage(self, layer: int, start_token: int, end_token: int) -> None:
        """Begin to copy these rows of a layer's growing tensors to the host, behind what the device has to do."""
        if self._mirror is None:
            return
        for index, tensor in enumerate(self.spec.layout.tensors):
            if tensor.layer == layer and tensor.kind.grows:
                self._mirror.prefetch(*self._byte_span(index, start_token, end_token, attached=True))

    def attach(self, tokens: int) -> None:
        """Declare that what is kept of the first `tokens` tokens was written into its places."""
        if self._mirror is not None and tokens:
            for index, tensor in enumerate(self.spec.layout.tensors):
                start = 0 if tensor.kind.grows else max(0, tokens - tensor.window_tokens)
                self._mirror.send(*self._byte_span(index, start, tokens, attached=False))
        for layer in self.layers:
            if layer.rows is not None:
                layer.rows.attach(tokens)
        self.tokens = tokens

    def fork(self) -> TorchKV:
        """An independent copy with the same room."""
        copy = TorchKV(self.spec, self._capacity_tokens, dense=True)
        copy._bytes.copy_(self._bytes)
        copy.tokens, copy.media = self.tokens, self.media
        for mine, other in zip(self.layers, copy.layers, strict=True):
            if mine.rows is not None and other.rows is not None:
                other.rows.copy_state(mine.rows)
        return copy

    @property
    def next_position(self) -> int:
        """The position of the next token, unless it is one of an image."""
        return self.tokens if self.media is None else self.tokens + self.media.position_offset

    def truncate(self, tokens: int) -> None:
        """Forget what a failed step may have added after the first `tokens` tokens; it left states alone."""
        assert tokens == self.tokens, f"the step that is undone began at {self.tokens} tokens, not at {tokens}"
        for layer in self.layers:
            if layer.rows is not None:
                layer.rows.truncate(tokens)

    def _host_bytes(self, first: int, last: int) -> memoryview:
        return self._host.data[first:last] if self._mirror is None else self._mirror.view(first, last)

    def _byte_span(self, tensor: int, start_token: int, end_token: int, *, attached: bool) -> tuple[int, int]:
        layout, (offset, nbytes) = self.spec.layout.tensors[tensor], self._spans[tensor]
        if is_state(layout):
            return offset, offset + nbytes
        rows = self.layers[layout.layer].rows
        assert rows is not None
        first, last = rows.span(start_token, end_token, attached=attached)
        return offset + first * layout.row_bytes, offset + last * layout.row_bytes

    def _make_layers(self) -> list[LayerKV]:
        layers = [LayerKV() for _ in range(self.spec.num_layers)]
        pending: dict[int, torch.Tensor] = {}
        for index, tensor in enumerate(self.spec.layout.tensors):
            layer, array = layers[tensor.layer], self._array(index)
            if is_state(tensor):
                states = layer.conv if tensor.kind is TensorKind.CONV else layer.recurrent
                states[len(states)] = array
            elif tensor.name == KEYS:
                pending[tensor.layer] = array
            elif tensor.kind is TensorKind.WINDOW:
                layer.rows = WindowRows(pending[tensor.layer], array, tensor.window_tokens)
            else:
                layer.rows = FullRows(pending[tensor.layer], array)
        return layers

    def _array(self, index: int) -> torch.Tensor:
        """The buffer of one tensor as [rows, *row_shape]."""
        tensor, (offset, nbytes) = self.spec.layout.tensors[index], self._spans[index]
        rows = self.spec.rows(tensor, self._capacity_tokens)
        return self._bytes[offset : offset + nbytes].view(getattr(torch, tensor.dtype)).view(rows, *tensor.row_shape)
