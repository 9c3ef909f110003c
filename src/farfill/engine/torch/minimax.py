"""MiniMax asks for a cache class of its own; this one keeps its lightning states where all others are kept.

transformers' MiniMaxCache takes the number of past tokens from layer 0, which is none when that is a lightning
layer, so its masks are wrong from the second chunk on. A step's cache knows the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from farfill.engine.torch.kv import TorchKV
from farfill.engine.torch.step import StepCache


class MiniMaxStepCache(StepCache, MiniMaxCache):
    """A `StepCache` that MiniMax accepts."""

    def __init__(self, sequences: Sequence[TorchKV], *, ragged: bool) -> None:
        StepCache.__init__(self, sequences, ragged=ragged)

    def __len__(self) -> int:
        return len(self.layers)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The lightning state of a layer, None before the first token."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Replace it."""
        layer = cast(Any, self.layers[layer_idx])
        layer.recurrent_states[0] = linear_cache
        layer.has_previous_state[0] = True


def observed(cache: MiniMaxCache) -> list[Any]:
    """What each layer of a cache after a forward pass keeps, as transformers' common layer classes would hold it."""
    layers: list[Any] = []
    for index in range(len(cache)):
        state: Any = cache.linear_cache[index] if index < len(cache.linear_cache) else []
        layers.append(state if isinstance(state, torch.Tensor) else cast(Cache, cache).layers[index])
    return [layer if isinstance(layer, (torch.Tensor, DynamicLayer)) else None for layer in layers]
