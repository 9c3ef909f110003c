"""Load this rank's part of a model, and find the layout of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from farfill.core.errors import ModelUnsupportedError
from farfill.core.layout import TensorKind, TensorLayout
from farfill.engine.torch import attention as attention_functions
from farfill.engine.torch.layout import ModelShape, derive_shape
from farfill.engine.torch.mamba1 import fix_continuation
from farfill.engine.torch.ranks.group import RankGroup
from farfill.engine.torch.ranks.layers import ExpertLoad, register, settle
from farfill.engine.torch.ranks.plan import keep_one_kv_head, plan
from farfill.engine.torch.ranks.shared_kv import SharedSpec
from farfill.engine.torch.weights import load_weights, open_config


@dataclass(frozen=True, slots=True)
class CutModel:
    """One rank's part of a model. `shape` is that of the whole; `called` are modules that ran (see `linear`)."""

    net: Any
    spec: SharedSpec
    shape: ModelShape
    experts: ExpertLoad
    head_everywhere: bool

    @property
    def called(self) -> frozenset[nn.Module]:
        return self.shape.called


def load_cut(
    folder: Path,
    dtype: str,
    attention: str,
    prefill_chunk_tokens: int,
    group: RankGroup,
    *,
    checkpoint_every_chunks: int = 0,
) -> CutModel:
    """All ranks at the same time: parts of the work are done together. Only rank 0 needs to know of checkpoints.

    Raises ModelUnsupportedError, ConfigError for a folder that is not whole.
    """
    attention_functions.register()
    experts = ExpertLoad()
    register(group, experts)
    config = open_config(folder)
    cut = plan(config, group.rank, group.size)
    net = load_weights(
        AutoModelForCausalLM,
        folder,
        config.model_type,
        dtype=getattr(torch, dtype),
        attn_implementation=attention_functions.SDPA,
        distributed_config=cut.config,
    ).eval()
    attention_functions.choose(net, attention)
    settle(net, group, experts)
    keep_one_kv_head(net, cut, group.size)
    fix_continuation(net)
    part = derive_shape(net, prefill_chunk_tokens)
    tensors, cut_tensors = _whole(part.layout.tensors, cut.kv_heads, group.size)
    layout = replace(part.layout, tensors=tensors)
    if not layout.resumable:
        layout = replace(layout, checkpoint_every_chunks=checkpoint_every_chunks)
    shape = replace(part, layout=layout)
    spec = SharedSpec(shape.layout, group.rank, group.size, cut_tensors, num_layers=shape.num_layers)
    return CutModel(net, spec, shape, experts, cut.head_everywhere)


def _whole(parts: Sequence[TensorLayout], kv_heads: int, ranks: int) -> tuple[tuple[TensorLayout, ...], frozenset[int]]:
    """The tensors of the whole model, and which of them are cut by heads; `kv_heads` of each, 0: none is cut."""
    tensors: list[TensorLayout] = []
    cut: set[int] = set()
    for index, tensor in enumerate(parts):
        if kv_heads and tensor.kind in (TensorKind.FULL, TensorKind.WINDOW):
            heads, *dim = tensor.row_shape
            if heads != max(1, kv_heads // ranks):
                raise ModelUnsupportedError(
                    f"engine.ranks: layer {tensor.layer} keeps {heads} heads on a rank, not its part of {kv_heads}"
                )
            cut.add(index)
            tensors.append(replace(tensor, row_shape=(kv_heads, *dim)))
        else:
            tensors.append(tensor)
    return tuple(tensors), frozenset(cut)
