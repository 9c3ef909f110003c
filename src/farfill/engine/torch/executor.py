"""The model on its device: allocates KV, computes prefill chunks, decodes batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farfill.core.errors import ModelUnsupportedError
from farfill.core.layout import KVLayout
from farfill.engine.executor import Capabilities, SequenceKV
from farfill.engine.torch import kernels, tiles
from farfill.engine.torch.attention import ragged_step
from farfill.engine.torch.host import pin_thread, trim_memory
from farfill.engine.torch.kv import KVSpec, TorchKV, is_state
from farfill.engine.torch.step import StepCache
from farfill.engine.torch.vision import VisionPrompt


class TorchExecutor:
    """Implements `engine.executor.Executor` with a transformers causal language model.

    `capabilities` may be set between steps: they decide how steps are computed.
    """

    def __init__(self, model: Any, spec: KVSpec) -> None:
        self.capabilities = Capabilities()
        self._model = model
        self._decoder = decoder_of(model)
        self._spec = spec
        self._step_class = _step_class(model)
        self._takes_positions = "position_ids" in inspect.signature(self._decoder.forward).parameters
        self._cpus: frozenset[int] = frozenset()
        if spec.device.type == "cpu":
            for name in {tensor.dtype for tensor in spec.layout.tensors if not is_state(tensor)}:
                kernels.prepare(getattr(torch, name))
            tiles.prepare()
        self.on_progress: Callable[[], None] = lambda: None
        self._after_layer: Callable[[int], None] | None = None
        # A chunk may take longer than peers put up with silence; a layer does not.
        for index, layer in enumerate(self._decoder.layers):
            layer.register_forward_hook(partial(self._layer_ran, index))

    @property
    def layout(self) -> KVLayout:
        """The model's KV layout."""
        return self._spec.layout

    def pin(self, cpus: frozenset[int]) -> None:
        """Let the thread that computes the next step, and the threads it starts, run on `cpus` only; none: any."""
        self._cpus = cpus

    def kv_bytes(self, capacity_tokens: int) -> int:
        """Memory of one sequence."""
        return self._spec.kv_bytes(capacity_tokens)

    def allocate(self, capacity_tokens: int, *, dense: bool = False) -> TorchKV:
        """An empty sequence; its pages cost nothing until they are written, unless `dense`."""
        return TorchKV(self._spec, capacity_tokens, dense=dense)

    @torch.inference_mode()
    def prefill(
        self, kv: SequenceKV, token_ids: Sequence[int], layer_done: Callable[[int], None] | None = None
    ) -> None:
        """Add the KV of one prefill chunk. Runs the model without its head."""
        assert isinstance(kv, TorchKV)
        self._pin_this_thread()
        cache = self._step_class([kv], ragged=False)
        end = kv.tokens + len(token_ids)
        outlet = None if layer_done is None else _LayerOutlet(kv, end, layer_done)
        try:
            self._extend(kv, token_ids, cache, None if outlet is None else outlet.layer_ran)
        finally:
            self._after_layer = None
        if outlet is not None:
            outlet.step_ran()
        cache.commit(len(token_ids))
        if isinstance(kv.media, VisionPrompt):
            kv.media.done(kv.tokens)

    @torch.inference_mode()
    def decode(self, rows: Sequence[tuple[SequenceKV, int]]) -> npt.NDArray[np.float32]:
        """Add one token to each sequence; logits (len(rows), vocab_size). All sequences move on, or none."""
        # It may run inside a prefill step, between two layers of that.
        after_layer, self._after_layer = self._after_layer, None
        try:
            return self._decode(rows)
        finally:
            self._after_layer = after_layer

    def progress(self) -> None:
        """Something of a long step is done."""
        self.on_progress()

    def idle(self) -> None:
        """Give freed heap pages back to the operating system."""
        trim_memory()

    def _decode(self, rows: Sequence[tuple[SequenceKV, int]]) -> npt.NDArray[np.float32]:
        sequences = [kv for kv, _ in rows if isinstance(kv, TorchKV)]
        assert len(sequences) == len(rows)
        self._pin_this_thread()
        tokens = [token for _, token in rows]
        if self.capabilities.merged_decode:
            caches = [self._step_class(sequences, ragged=True)]
            with ragged_step([kv.tokens + 1 for kv in sequences]):
                logits = self._next_logits([[token] for token in tokens], sequences, caches[0])
        else:
            caches = [self._step_class([kv], ragged=False) for kv in sequences]
            parts = [
                self._next_logits([[token]], cache.sequences, cache)
                for token, cache in zip(tokens, caches, strict=True)
            ]
            logits = np.concatenate(parts)
        for cache in caches:
            cache.commit(1)
        return logits

    def _next_logits(
        self, token_ids: Sequence[Sequence[int]], sequences: Sequence[TorchKV], cache: StepCache
    ) -> npt.NDArray[np.float32]:
        out = self._run(self._model, token_ids, [kv.next_position for kv in sequences], cache)
        return out.logits[:, -1].float().cpu().numpy()

    def _extend(
        self, kv: TorchKV, token_ids: Sequence[int], cache: StepCache, after_layer: Callable[[int], None] | None
    ) -> None:
        """Run the decoder over `token_ids`; `after_layer` hears of its layers when all of them went through."""
        at_once = kv.tokens == 0 or self.capabilities.chunked_prefill
        runs = [token_ids] if at_once else [[token] for token in token_ids]
        start = kv.tokens
        for run in runs:
            if run is runs[-1]:
                self._after_layer = after_layer
            if isinstance(kv.media, VisionPrompt):
                self._decoder(**kv.media.step(start, len(run), cache), cache=cache, use_cache=True)
            else:
                self._run(self._decoder, [run], [start], cache)
            start += len(run)
            cache.saw(len(run))

    def _run(self, net: Any, token_ids: Sequence[Sequence[int]], starts: Sequence[int], cache: StepCache) -> Any:
        """A forward pass over `token_ids` [batch, q], row i at positions from `starts[i]` on."""
        ids = torch.tensor([list(row) for row in token_ids], device=self._spec.device)
        if not self._takes_positions:
            return net(input_ids=ids, cache=cache, use_cache=True)
        first = torch.tensor(starts, device=self._spec.device).unsqueeze(1)
        positions = first + torch.arange(ids.shape[1], device=self._spec.device)
        return net(input_ids=ids, position_ids=positions, cache=cache, use_cache=True)

    def _layer_ran(self, index: int, *_: object) -> None:
        self.on_progress()
        if self._after_layer is not None:
            self._after_layer(index)

    def _pin_this_thread(self) -> None:
        """The thread that computes is known from its first step on."""
        if self._cpus:
            pin_thread(self._cpus)
            self._cpus = frozenset()


class _LayerOutlet:
    """Tells of the layers of one prefill step, in order, once their rows can be read.

    On a device of its own, a layer is told of when the next one has been queued: reading it then waits while the
    device has something to do.
    """

    def __init__(self, kv: TorchKV, end: int, layer_done: Callable[[int], None]) -> None:
        self._kv = kv
        self._start, self._end = kv.tokens, end
        self._layer_done = layer_done
        self._waiting: list[int] = []

    def layer_ran(self, index: int) -> None:
        """The rows of layer `index` were written, or will be by what the device was told."""
        self._kv.stage(index, self._start, self._end)
        self._waiting.append(index)
        if len(self._waiting) > self._kv.spec.staged:
            self._layer_done(self._waiting.pop(0))

    def step_ran(self) -> None:
        """No more layers come."""
        for index in self._waiting:
            self._layer_done(index)


def decoder_of(model: Any) -> Any:
    """The model without its head: `base_model` for most; some name theirs differently from what that looks for."""
    candidates = (model.base_model, model.get_decoder(), getattr(model, "model", None))
    found = next((candidate for candidate in candidates if hasattr(candidate, "layers")), None)
    if found is None:
        raise ModelUnsupportedError(
            f"model_type {model.config.model_type}: {type(model).__name__} has no list of decoder layers"
        )
    return found


def _step_class(model: Any) -> type[StepCache]:
    if model.config.model_type != "minimax":
        return StepCache
    from farfill.engine.torch.minimax import MiniMaxStepCache

    return MiniMaxStepCache
