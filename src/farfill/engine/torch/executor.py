"""The model on its device: allocates KV, computes prefill chunks, decodes batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farfill.core.layout import KVLayout
from farfill.engine.executor import SequenceKV
from farfill.engine.torch.attention import BatchCache
from farfill.engine.torch.host import trim_memory
from farfill.engine.torch.kv import KVSpec, TorchKV


class TorchExecutor:
    """Implements `engine.executor.Executor` with a transformers causal language model."""

    def __init__(self, model: Any, spec: KVSpec) -> None:
        self._model = model
        self._spec = spec
        self.on_progress: Callable[[], None] = lambda: None
        self._layer_done: Callable[[int], None] | None = None
        # A chunk may take longer than peers put up with silence; a layer does not.
        for index, layer in enumerate(getattr(model.base_model, "layers", ())):
            layer.register_forward_hook(partial(self._after_layer, index))

    @property
    def layout(self) -> KVLayout:
        """The model's KV layout."""
        return self._spec.layout

    def kv_bytes(self, capacity_tokens: int) -> int:
        """Memory of one sequence."""
        return self._spec.kv_bytes(capacity_tokens)

    def allocate(self, capacity_tokens: int) -> TorchKV:
        """An empty sequence; its pages cost nothing until they are written."""
        return TorchKV(self._spec, capacity_tokens)

    @torch.inference_mode()
    def prefill(
        self, kv: SequenceKV, token_ids: Sequence[int], layer_done: Callable[[int], None] | None = None
    ) -> None:
        """Add the KV of one prefill chunk. Runs the model without its head."""
        assert isinstance(kv, TorchKV)
        self._layer_done = layer_done
        try:
            self._prefill(kv, token_ids)
        finally:
            self._layer_done = None

    def _prefill(self, kv: TorchKV, token_ids: Sequence[int]) -> None:
        start = kv.tokens
        ids = torch.tensor([list(token_ids)], device=self._spec.device)
        positions = torch.arange(start, start + len(token_ids), device=self._spec.device).unsqueeze(0)
        self._model.base_model(input_ids=ids, position_ids=positions, cache=kv, use_cache=True)
        kv.advance(len(token_ids))

    @torch.inference_mode()
    def decode(self, rows: Sequence[tuple[SequenceKV, int]]) -> npt.NDArray[np.float32]:
        """Add one token to each sequence; logits (len(rows), vocab_size)."""
        sequences = [kv for kv, _ in rows if isinstance(kv, TorchKV)]
        assert len(sequences) == len(rows)
        device = self._spec.device
        ids = torch.tensor([[token] for _, token in rows], device=device)
        positions = torch.tensor([[kv.tokens] for kv in sequences], device=device)
        out = self._model(input_ids=ids, position_ids=positions, cache=BatchCache(sequences), use_cache=True)
        for kv in sequences:
            kv.advance(1)
        return out.logits[:, -1].float().cpu().numpy()

    def _after_layer(self, index: int, *_: object) -> None:
        self.on_progress()
        if self._layer_done is not None:
            self._layer_done(index)

    def idle(self) -> None:
        """Give freed heap pages back to the operating system."""
        trim_memory()
