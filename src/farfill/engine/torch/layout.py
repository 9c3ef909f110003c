"""Which tensors a model keeps, read from the cache that transformers itself makes for it.

Full, sliding-window and chunked attention, latents (MLA), and recurrent and convolution states, in any mixture.
What is kept elsewhere, or in other ways, is refused by name: a wrong guess would give wrong text, not an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from farfill.core.errors import ModelUnsupportedError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.torch.kv import KEYS, VALUES

# Rotary embeddings that change with the longest sequence of the batch: cached keys would not mean the same twice.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_REFUSED = {
    "recurrent_gemma": "keeps its state on its modules, where requests would share it",
    "rwkv": "keeps its state outside of any cache",
    "xlstm": "keeps its state in a cache of its own",
    "deepseek_v32": "selects tokens by an index (DSA), and was found to answer differently in prefill chunks",
    "deepseek_v4": "compresses its cache, and was found to answer differently in prefill chunks",
    "glm_moe_dsa": "selects tokens by an index (DSA), as deepseek_v32 does",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's layout, and what else an engine must know of it (see `kv.KVSpec`). `called`: modules that ran."""

    layout: KVLayout
    num_layers: int
    chunked: frozenset[int]
    called: frozenset[nn.Module]


def require_known(config: Any) -> None:
    """Raise ModelUnsupportedError for architectures known not to work; needs no weights."""
    reason = _REFUSED.get(config.model_type)
    if reason is not None:
        raise ModelUnsupportedError(f"model_type {config.model_type}: it {reason}")
    if getattr(config, "use_bidirectional_attention", None) is True or not getattr(config, "is_causal", True):
        raise ModelUnsupportedError(f"model_type {config.model_type}: it is not causal")
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise ModelUnsupportedError(
                f"model_type {config.model_type}: {rope['rope_type']} rotary embeddings depend on the batch"
            )


@torch.inference_mode()
def derive_shape(model: Any, prefill_chunk_tokens: int) -> ModelShape:
    """The shape of `model`'s cache, with row shapes and dtypes seen in a forward pass of two tokens.

    Raises ModelUnsupportedError when it keeps anything that this engine cannot move or continue.
    """
    config = model.config.get_text_config()
    require_known(config)
    cache = new_cache(model)
    # Before the pass: layers of some kinds cannot even be made use of.
    for index, layer in enumerate(cache.layers):
        _require_layer(index, layer)
    before = dict(_tensors_on_modules(model))
    called: set[nn.Module] = set()
    listening = register_module_forward_pre_hook(lambda module, _: called.add(module))
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    try:
        model(input_ids=ids, cache=cache, use_cache=True)
    finally:
        listening.remove()
    _require_stateless(model, before)
    latent = getattr(config, "kv_lora_rank", None) is not None
    tensors: list[TensorLayout] = []
    layers = _layers(cache)
    for index, layer in enumerate(layers):
        tensors.extend(_layer_tensors(index, layer, latent=latent))
    if not tensors:
        raise ModelUnsupportedError(f"model_type {config.model_type}: it keeps nothing in its cache")
    types = getattr(config, "layer_types", None) or ["chunked_attention" if _is_chunked(config) else ""] * len(layers)
    chunked = frozenset(index for index, kind in enumerate(types) if kind == "chunked_attention")
    return ModelShape(KVLayout(tuple(tensors), prefill_chunk_tokens), len(layers), chunked, frozenset(called))


def new_cache(model: Any) -> Any:
    """An empty cache as transformers makes it."""
    if model.config.model_type == "minimax":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return DynamicCache(config=model.config.get_text_config())


def _is_chunked(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is None and getattr(config, "attention_chunk_size", None) is not None


def _layers(cache: Any) -> list[Any]:
    if type(cache) is DynamicCache:
        return cache.layers
    from farfill.engine.torch.minimax import observed

    return observed(cache)


def _require_layer(index: int, layer: Any) -> None:
    known = (
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        DummyLayer,
    )
    if type(layer) not in known or getattr(layer, "sliding_window", 2) < 2:
        raise ModelUnsupportedError(f"layer {index} keeps a {type(layer).__name__}, which this engine cannot move")


def _layer_tensors(index: int, layer: Any, *, latent: bool) -> Iterator[TensorLayout]:
    if isinstance(layer, torch.Tensor):
        yield _state(index, "recurrent0", TensorKind.RECURRENT, layer)
        return
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor):
        window = layer.sliding_window - 1 if isinstance(layer, DynamicSlidingWindowLayer) else 0
        full = TensorKind.LATENT if latent and keys.shape[1] == 1 else TensorKind.FULL
        for name, tensor in ((KEYS, keys), (VALUES, values)):
            kind = TensorKind.WINDOW if window else full
            yield TensorLayout(index, name, kind, _dtype(tensor), (tensor.shape[1], tensor.shape[3]), window)
    if isinstance(layer, LinearAttentionLayer):
        for number, state in layer.conv_states.items():
            if state is not None:
                yield _state(index, f"conv{number}", TensorKind.CONV, state)
        for number, state in layer.recurrent_states.items():
            if state is not None:
                yield _state(index, f"recurrent{number}", TensorKind.RECURRENT, state)


def _state(index: int, name: str, kind: TensorKind, tensor: torch.Tensor) -> TensorLayout:
    return TensorLayout(index, name, kind, _dtype(tensor), tuple(tensor.shape[1:]))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors_on_modules(model: nn.Module) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Tensors that are plain attributes of modules: neither parameters nor buffers."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield (name, attribute), value


def _require_stateless(model: Any, before: dict[tuple[str, str], torch.Tensor]) -> None:
    for (module, attribute), value in _tensors_on_modules(model):
        if before.get((module, attribute)) is not value:
            raise ModelUnsupportedError(
                f"model_type {model.config.model_type}: it keeps state on its modules ({module}.{attribute}), "
                "where requests would share it"
            )
