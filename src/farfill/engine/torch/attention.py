"""Attention for many sequences at once without padding, masks or copies.

A decode step runs the model's linear layers on all sequences together ([B, 1] tokens); only attention is done
sequence by sequence, each over its own KV buffer. The model calls `BatchCache.update` and hands what it returns
to the attention function registered here. Prefill of one sequence takes transformers' own `sdpa` path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from farfill.core.errors import ModelUnsupportedError
from farfill.engine.torch.kv import TorchKV

IMPLEMENTATION = "farfill"

# What models pass besides the tensors; anything else could change the result, so it is refused.
_KNOWN_ARGUMENTS = frozenset(
    {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache", "cache", "output_attentions", "softcap"}
)


class BatchRows(list[torch.Tensor]):
    """Keys or values of one layer, one [1, heads, tokens, dim] tensor a sequence."""


class BatchCache(Cache):
    """The `cache=` of a decode step: row i of the batch belongs to sequence i."""

    def __init__(self, sequences: Sequence[TorchKV]) -> None:
        super().__init__(layers=sequences[0].layers)
        self._sequences = sequences

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append row i of [B, heads, 1, dim] to sequence i; everything each may look at."""
        all_keys, all_values = BatchRows(), BatchRows()
        for row, sequence in enumerate(self._sequences):
            layer = sequence.layer(layer_idx)
            keys, values = layer.update(key_states.narrow(0, row, 1), value_states.narrow(0, row, 1))
            all_keys.append(keys)
            all_values.append(values)
        return all_keys, all_values


def batch_attention(  # noqa: PLR0917 (transformers calls it so)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [B, heads, q, dim] over each sequence's KV; [B, q, heads, dim]."""
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _KNOWN_ARGUMENTS]
    if unknown or kwargs.get("softcap") is not None:
        raise ModelUnsupportedError(f"{type(module).__name__} needs attention with {', '.join(unknown) or 'softcap'}")
    if not isinstance(key, BatchRows):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, _, dim = query.shape
    kv_heads = key[0].shape[1]
    # One query token: the heads that share a KV head become its query rows, so KV is never repeated.
    packed = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    outputs = [
        scaled_dot_product_attention(packed.narrow(0, row, 1), key[row], value[row], scale=scaling)
        for row in range(batch)
    ]
    output = torch.cat(outputs) if batch > 1 else outputs[0]
    return output.reshape(batch, 1, heads, output.shape[-1]), None


def batch_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask for single tokens, which may look at everything they are given; transformers' own otherwise."""
    return None if kwargs["q_length"] == 1 else sdpa_mask(*args, **kwargs)


def register() -> None:
    """Make `attn_implementation="farfill"` known to transformers. Idempotent."""
    AttentionInterface.register(IMPLEMENTATION, batch_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, batch_mask)
