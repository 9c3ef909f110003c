"""Which tensors a model keeps per token, read from the cache that transformers itself would make for it.

Only models whose whole state is full or sliding-window attention are accepted; everything else is refused by
name, because a wrong guess would give wrong text, not an error.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from farfill.core.errors import ModelUnsupportedError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout

_ATTENTION_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings that change with the longest sequence of the batch: cached keys would not mean the same twice.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@torch.inference_mode()
def derive_layout(model: Any, prefill_chunk_tokens: int) -> KVLayout:
    """The layout of `model`'s cache, with row shapes and dtypes seen in a forward pass of two tokens."""
    config = model.config.get_text_config()
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        _kind(index, layer)
    _require_supported(model, config)
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    model.base_model(input_ids=ids, cache=cache, use_cache=True)
    tensors: list[TensorLayout] = []
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        kind, window = _kind(index, layer)
        for name, tensor in (("k", layer.keys), ("v", layer.values)):
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append(TensorLayout(index, name, kind, dtype, (tensor.shape[1], tensor.shape[3]), window))
    return KVLayout(tuple(tensors), prefill_chunk_tokens)


def _kind(index: int, layer: Any) -> tuple[TensorKind, int]:
    if type(layer) is DynamicLayer:
        return TensorKind.FULL, 0
    if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1:
        return TensorKind.WINDOW, layer.sliding_window - 1
    raise ModelUnsupportedError(f"layer {index} keeps a {type(layer).__name__}, which this engine cannot move")


def _require_supported(model: Any, config: Any) -> None:
    name = type(model).__name__
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES
    if others:
        raise ModelUnsupportedError(f"{name} has {', '.join(sorted(others))} layers, which this engine cannot batch")
    for key in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(config, key, None) is not None:
            raise ModelUnsupportedError(f"{name} uses {key}, which this engine does not support")
    if not (getattr(model, "_supports_sdpa", False) and getattr(model, "_supports_attention_backend", False)):
        raise ModelUnsupportedError(f"{name} does not let its attention be replaced")
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelUnsupportedError(f"{name} is not causal")
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise ModelUnsupportedError(f"{name} uses {rope['rope_type']} rotary embeddings, which depend on the batch")
