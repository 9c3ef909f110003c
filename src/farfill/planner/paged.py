"""What vLLM keeps and sends of a model: whole blocks of its paged cache, and states as its kernels want them.

As vLLM 0.32 has it (`model_executor/layers/mamba/mamba_utils.py`): a convolution keeps one column less than its kernel,
in the type of the cache; a recurrent state has that type too, but for KDA, whose is float32.
"""

from __future__ import annotations

from dataclasses import replace

from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.planner.geometry import Geometry

FLOAT32_STATES = frozenset({"kimi_linear", "bailing_hybrid"})


def vllm_geometry(geometry: Geometry, block_tokens: int, *, state_dtype: str | None = None) -> Geometry:
    """`geometry` as vLLM keeps it in blocks of `block_tokens`; `state_dtype` unset: vLLM's own choice."""
    cache = next((t.dtype for t in geometry.layout.tensors if t.kind is not TensorKind.RECURRENT), None)
    if state_dtype is None:
        state_dtype = "float32" if geometry.model_type in FLOAT32_STATES else cache
    tensors = tuple(_as_kept(tensor, block_tokens, state_dtype) for tensor in geometry.layout.tensors)
    step = geometry.layout.prefill_chunk_tokens
    chunk_tokens = -(-step // block_tokens) * block_tokens
    return replace(geometry, layout=KVLayout(tensors, chunk_tokens))


def _as_kept(tensor: TensorLayout, block_tokens: int, state_dtype: str | None) -> TensorLayout:
    if tensor.kind.has_rows:
        return replace(tensor, row_shape=(*tensor.row_shape, block_tokens), row_tokens=block_tokens)
    if tensor.kind is TensorKind.CONV:
        return replace(tensor, row_shape=(tensor.row_shape[0], tensor.row_shape[1] - 1))
    return replace(tensor, dtype=state_dtype or tensor.dtype)
