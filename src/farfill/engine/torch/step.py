"""One step over one or more sequences, as the `cache=` that transformers' models read and write.

New rows go straight into each sequence's buffer. States are worked on as copies, stacked over the batch, because
models change them in place; `commit` writes them back, so a step that fails leaves every sequence as it was (rows
it added do not count until then).

A *ragged* step adds one token to each of many sequences. Nothing is padded: attention layers tell where each
sequence's rows are, and the attention function (see `attention`) looks at each for itself. Latents (MLA) are first
expanded by the model, so they are handed out as one tensor with empty rows at the end, which attention leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionLayer

from farfill.core.layout import TensorKind
from farfill.engine.torch import kernels
from farfill.engine.torch.kv import LayerKV, TorchKV, is_state
from farfill.engine.torch.rows import KeysAndValues, Rows


class RaggedRows:
    """Keys or values of one layer: what each sequence's new token may look at.

    `side`: 0 for keys, 1 for values. `spans` are (first row, rows) of each sequence's buffer.
    """

    __slots__ = ("rows", "side", "spans")

    def __init__(self, rows: Sequence[Rows], spans: Sequence[tuple[int, int]], side: int) -> None:
        self.rows = rows
        self.spans = spans
        self.side = side

    @property
    def shape(self) -> torch.Size:
        """[heads, dim] of a row."""
        return self._buffer.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        """The type of their numbers."""
        return self._buffer.dtype

    @property
    def readable(self) -> bool:
        """Whether `addresses` can be made use of (see `kernels`)."""
        return kernels.supports(self._buffer)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Rows of each sequence."""
        return np.array([count for _, count in self.spans], np.int64)

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Where the first of them is, of each sequence."""
        side, nbytes = self.side, self.row_bytes
        firsts = [rows.addresses[side] + first * nbytes for rows, (first, _) in zip(self.rows, self.spans, strict=True)]
        return np.array(firsts, np.int64)

    @property
    def row_bytes(self) -> int:
        """From one row to the next."""
        return self.rows[0].row_bytes[self.side]

    def tensors(self) -> list[torch.Tensor]:
        """[1, heads, rows, dim] of each sequence."""
        return [rows.seen(*span)[self.side] for rows, span in zip(self.rows, self.spans, strict=True)]

    @property
    def _buffer(self) -> torch.Tensor:
        return self.rows[0].value_rows if self.side else self.rows[0].key_rows


class _AttentionStep(CacheLayerMixin):
    """The rows of one layer of every sequence."""

    def __init__(self, rows: Sequence[Rows], *, ragged: bool, dense: bool, chunked: bool) -> None:
        super().__init__()
        self.is_initialized = True
        self.is_sliding = rows[0].window > 0
        self._rows = rows
        self._ragged = ragged
        self._dense = dense
        self._chunk_tokens = rows[0].window + 1 if chunked else 0
        self.ahead = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Buffers exist from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append [batch, heads, q, dim]; everything each sequence's new tokens may look at."""
        if self.ahead:
            return self._append_and_look_ahead(key_states, value_states)
        if not self._ragged:
            return self._rows[0].append(key_states, value_states)
        new = [sequence.extend() for sequence in self._rows]
        self._write([row for row, _, _ in new], key_states, value_states)
        spans = [(first, count) for _, first, count in new]
        if self._chunk_tokens:
            spans = [self._own_chunk(sequence.length, *span) for sequence, span in zip(self._rows, spans, strict=True)]
        keys, values = RaggedRows(self._rows, spans, 0), RaggedRows(self._rows, spans, 1)
        return (_pad(keys.tensors()), _pad(values.tensors())) if self._dense else (keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys seen by the next step, position of the first)."""
        return self._rows[0].mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Tokens so far, kept or not."""
        return self._rows[0].length

    def get_max_length(self) -> int:
        """Tokens a step may look at, its own included; -1: no bound."""
        return self._rows[0].window + 1 if self.is_sliding else -1

    def _append_and_look_ahead(self, key_states: torch.Tensor, value_states: torch.Tensor) -> KeysAndValues:
        """Append all but the last `ahead` tokens, which are only looked at."""
        kept = key_states.shape[2] - self.ahead
        keys, values = self._rows[0].append(key_states[:, :, :kept], value_states[:, :, :kept])
        return torch.cat([keys, key_states[:, :, kept:]], dim=2), torch.cat([values, value_states[:, :, kept:]], dim=2)

    def _write(self, at: Sequence[int], key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Put each sequence's new token into its row."""
        sides = ((key_states, self._rows[0].key_rows), (value_states, self._rows[0].value_rows))
        if not all(kernels.supports(buffer) and states.dtype is buffer.dtype for states, buffer in sides):
            for index, (sequence, row) in enumerate(zip(self._rows, at, strict=True)):
                sequence.write(row, key_states.narrow(0, index, 1), value_states.narrow(0, index, 1))
            return
        for side, (states, _) in enumerate(sides):
            nbytes = self._rows[0].row_bytes[side]
            targets = [rows.addresses[side] + row * nbytes for rows, row in zip(self._rows, at, strict=True)]
            kernels.put(states, np.array(targets, np.int64))

    def _own_chunk(self, length: int, first: int, count: int) -> tuple[int, int]:
        """Of the rows seen, the last token's own run of `_chunk_tokens` tokens, up to it."""
        own = (length - 1) % self._chunk_tokens + 1
        return first + count - own, own


class _StateStep(LinearAttentionLayer):
    """The states of one layer, stacked over the batch. `seen`: there is something in them."""

    def __init__(self, layers: Sequence[LayerKV], *, seen: bool) -> None:
        LinearAttentionLayer.__init__(self, max(len(layers[0].conv), len(layers[0].recurrent)))
        self.is_initialized = True
        for index in layers[0].conv:
            state = torch.cat([layer.conv[index] for layer in layers])
            self.conv_states[index] = state
            self.conv_kernel_size[index] = state.shape[-1]  # type: ignore[assignment]
            self.is_conv_states_initialized[index] = True
            self.dtype, self.device = state.dtype, state.device  # type: ignore[assignment]
        for index in layers[0].recurrent:
            self.recurrent_states[index] = torch.cat([layer.recurrent[index] for layer in layers])
            self.is_recurrent_states_initialized[index] = True
        self.has_previous_state = dict.fromkeys(self.has_previous_state, seen)

    def write_back(self, layers: Sequence[LayerKV]) -> None:
        """Store each sequence's part."""
        for row, layer in enumerate(layers):
            for index, state in layer.conv.items():
                state.copy_(cast(torch.Tensor, self.conv_states[index]).narrow(0, row, 1))
            for index, state in layer.recurrent.items():
                state.copy_(cast(torch.Tensor, self.recurrent_states[index]).narrow(0, row, 1))


class _AttentionAndStateStep(_StateStep, _AttentionStep):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Both in one layer (Falcon-H1, Zamba2)."""

    def __init__(
        self, rows: Sequence[Rows], layers: Sequence[LayerKV], *, seen: bool, ragged: bool, dense: bool, chunked: bool
    ) -> None:
        _AttentionStep.__init__(self, rows, ragged=ragged, dense=dense, chunked=chunked)
        _StateStep.__init__(self, layers, seen=seen)


class StepCache(Cache):
    """The `cache=` of one step. Not ragged: any number of new tokens of one sequence."""

    def __init__(self, sequences: Sequence[TorchKV], *, ragged: bool) -> None:
        assert ragged or len(sequences) == 1
        self.sequences = sequences
        self._tokens = sequences[0].tokens
        spec = sequences[0].spec
        latent = {t.layer for t in spec.layout.tensors if t.kind is TensorKind.LATENT}
        layers: list[Any] = []
        for index in range(spec.num_layers):
            parts = [sequence.layers[index] for sequence in sequences]
            rows = [part.rows for part in parts if part.rows is not None]
            options = {"ragged": ragged, "dense": index in latent, "chunked": index in spec.chunked}
            # One token after nothing: zeros are the state, and rows of a batch must not differ in kind.
            seen = ragged or self._tokens > 0
            has_state = bool(parts[0].conv or parts[0].recurrent)
            if rows and has_state:
                layers.append(_AttentionAndStateStep(rows, parts, seen=seen, **options))
            elif rows:
                layers.append(_AttentionStep(rows, **options))
            else:
                layers.append(_StateStep(parts, seen=seen) if has_state else DummyLayer())
        Cache.__init__(self, layers=layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before those of this forward pass, whatever the layer keeps."""
        return self._tokens

    def look_ahead(self, tokens: int) -> None:
        """The next forward pass of one sequence has `tokens` more at its end that are not to be kept."""
        # A state has no rows to leave out again.
        assert not tokens or not any(is_state(tensor) for tensor in self.sequences[0].spec.layout.tensors)
        for layer in self.layers:
            if isinstance(layer, _AttentionStep):
                layer.ahead = tokens

    def saw(self, new_tokens: int) -> None:
        """A forward pass of this step is over, another one may follow."""
        self._tokens += new_tokens

    def commit(self, new_tokens: int) -> None:
        """The step succeeded: keep its states, and count its tokens in every sequence."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, _StateStep):
                layer.write_back([sequence.layers[index] for sequence in self.sequences])
        for sequence in self.sequences:
            sequence.tokens += new_tokens


def _pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[batch, heads, longest, dim], each sequence's rows first."""
    if len(rows) == 1:
        return rows[0]
    _, heads, _, dim = rows[0].shape
    padded = rows[0].new_zeros((len(rows), heads, max(row.shape[2] for row in rows), dim))
    for index, row in enumerate(rows):
        padded[index, :, : row.shape[2]] = row[0]
    return padded
