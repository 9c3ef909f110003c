"""How a model is cut for a number of ranks: transformers' own plans, less what cannot be cut evenly.

Attention is cut by heads when query heads divide among the ranks, and KV heads divide or are fewer (a KV head then
lives on several ranks). Otherwise, and for latents (MLA), every rank computes all of it. MLPs are cut by their inner
dimension, experts by expert, or each like an MLP where they do not divide. Layers that keep a state are never cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from farfill.core.errors import ModelUnsupportedError
from farfill.engine.torch.ranks.layers import EXPERT_DISPATCH, linear_of

# Found to answer over 2 and 4 ranks as on one (tests/unit/engine/torch/ranks); others may not, and are refused.
KNOWN = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "cohere2",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "kimi_linear",
    "bailing_hybrid",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2_moe",
    "minimax",
    "jamba",
)

_KEPT = re.compile(r"\.(self_attn|mlp|shared_experts?|experts)\.|\.experts$")
_ATTENTION = re.compile(r"\.self_attn\.")
_KEYS_AND_VALUES = re.compile(r"\.self_attn\.[kv]_proj$")
_NOTHING = re.compile(r"$^")
_STYLES = {
    "colwise",
    "rowwise",
    "packed_colwise",
    "moe_tp_experts",
    "mla_kv_a_proj",
    "replicated_with_grad_allreduce",
}
_WHOLE = "replicate"


@dataclass(frozen=True, slots=True)
class Cut:
    """What transformers is told, and what it is not good at: `kv_head`, the one this rank has when they are too few.

    `kv_heads` is their number on all ranks together when they are cut, else 0. `head_everywhere`: every rank could
    compute logits, so only rank 0 does.
    """

    config: DistributedConfig
    kv_heads: int
    kv_head: int | None
    head_everywhere: bool


def require_cuttable(config: Any) -> None:
    """Raise ModelUnsupportedError for models not known to work over several ranks; needs no weights."""
    if config.model_type not in KNOWN:
        raise ModelUnsupportedError(
            f"engine.ranks: model_type {config.model_type} is not known to answer over several ranks as on one; "
            f"{', '.join(KNOWN)} are. Set engine.ranks: 1"
        )


def plan(config: Any, rank: int, ranks: int) -> Cut:
    """The cut of the model of `config`. Raises ModelUnsupportedError for models not known to work."""
    require_cuttable(config)
    with torch.device("meta"):
        net: Any = AutoModelForCausalLM.from_config(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    by_heads = (
        any(_KEYS_AND_VALUES.search(name) for name in net.tp_plan)
        and heads % ranks == 0
        and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    )
    few = by_heads and kv_heads < ranks
    tied = bool(getattr(config, "tie_word_embeddings", False))
    uncut = _NOTHING if by_heads and not few else _KEYS_AND_VALUES if by_heads else _ATTENTION
    rules: dict[str, str] = {}
    for name, style in net.tp_plan.items():
        if name == "lm_head":
            rules[name] = _WHOLE if tied else style
        elif not _KEPT.search(name) or uncut.search(name):
            rules[name] = _WHOLE
        elif style not in _STYLES:
            raise ModelUnsupportedError(f"engine.ranks: {config.model_type} wants {name} cut by {style}")
    experts = getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None) or 0
    whole_experts = bool(net.ep_plan) and experts and experts % ranks == 0
    return Cut(
        DistributedConfig(
            tp_size=ranks,
            tp_plan=rules,
            ep_size=ranks if whole_experts else 1,
            ep_implementation=EXPERT_DISPATCH,
        ),
        kv_heads=kv_heads if by_heads else 0,
        kv_head=rank * kv_heads // ranks if few else None,
        head_everywhere=tied or "lm_head" not in net.tp_plan,
    )


def keep_one_kv_head(net: nn.Module, cut: Cut, ranks: int) -> None:
    """Drop the KV heads that this rank's query heads do not look at."""
    if cut.kv_head is None:
        return
    for module in net.modules():
        if not (hasattr(module, "k_proj") and hasattr(module, "v_proj")):
            continue
        config: Any = net.config
        for name in ("k_proj", "v_proj"):
            linear = getattr(module, name)
            dim = linear.out_features // config.num_key_value_heads
            rows = slice(cut.kv_head * dim, (cut.kv_head + 1) * dim)
            bias = None if linear.bias is None else linear.bias.detach()[rows].clone()
            setattr(module, name, linear_of(linear.weight.detach()[rows].clone(), bias))
        module.num_key_value_groups = config.num_attention_heads // ranks  # type: ignore[assignment]
