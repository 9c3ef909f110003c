"""Tiny models with seeded random weights, one of each architecture the embedded engine is meant for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farfill.engine.fake import EOS_ID, VOCAB_SIZE, byte_tokenizer

WINDOW = 24
CONTEXT = 512

_FULL, _SLIDING, _LINEAR, _CONV = "full_attention", "sliding_attention", "linear_attention", "conv"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    # A tied head mostly echoes the last token of a random model.
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED: dict[str, Any] = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_SHARING: dict[str, Any] = {
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a tiny model is made, and what the engine is expected to find it can do."""

    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    merged_decode: bool = True


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaConfig"),
    "qwen3": Architecture("Qwen3Config"),
    "qwen3_moe": Architecture("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}),
    "gemma2": Architecture("Gemma2Config", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": [_SLIDING] * 3 + [_FULL]},
    ),
    "gemma3n": Architecture(
        "Gemma3nTextConfig",
        {
            **_SHARING,
            "num_hidden_layers": 5,
            "laurel_rank": 8,
            "layer_types": [_SLIDING, _FULL] + [_SLIDING] * 2 + [_FULL],
        },
    ),
    "gemma4": Architecture(
        "Gemma4TextConfig",
        {**_SHARING, "num_hidden_layers": 6, "global_head_dim": 32, "layer_types": [_SLIDING, _SLIDING, _FULL] * 2},
    ),
    "gpt_oss": Architecture(
        "GptOssConfig", {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "mimo_v2_flash": Architecture(
        "MiMoV2FlashConfig", {**_SHARED, "num_hidden_layers": 6, "sliding_window": WINDOW, "v_head_dim": 16}
    ),
    "cohere2": Architecture("Cohere2Config", {"sliding_window": WINDOW}),
    "llama4": Architecture(
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "no_rope_layer_interval": 4,
        },
    ),
    "qwen3_next": Architecture(
        "Qwen3NextConfig", {**_DELTA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}
    ),
    "qwen3_5": Architecture("Qwen3_5TextConfig", _DELTA),
    "kimi_linear": Architecture(
        "KimiLinearConfig",
        {
            **_MLA,
            **_SHARED,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": [_LINEAR] * 3 + [_FULL],
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
    "bailing_hybrid": Architecture(
        "BailingHybridConfig",
        {
            **_MLA,
            **_SHARED,
            "num_experts": 4,
            "num_mtp_layers": 0,
            "layer_types": [_LINEAR] * 3 + [_FULL],
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
    "olmo_hybrid": Architecture(
        "OlmoHybridConfig",
        {**_DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 32},
    ),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybridConfig",
        {
            **_MAMBA2,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "bamba": Architecture("BambaConfig", {**_MAMBA2, "attn_layer_indices": [2]}),
    "falcon_h1": Architecture("FalconH1Config", {**_MAMBA2, "num_hidden_layers": 3, "mamba_d_ssm": 128}),
    "nemotron_h": Architecture(
        "NemotronHConfig",
        {
            **_SHARED,
            "num_hidden_layers": 5,
            "layers_block_type": [_LINEAR, "moe", _FULL, "mlp", _LINEAR],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "zamba2": Architecture(
        "Zamba2Config",
        {
            "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "num_key_value_heads": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
        },
    ),
    "lfm2": Architecture(
        "Lfm2Config", {"layer_types": [_CONV, _CONV, _FULL, _CONV], "block_auto_adjust_ff_dim": False}
    ),
    "lfm2_moe": Architecture(
        "Lfm2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "num_dense_layers": 1, "layer_types": [_CONV, _CONV, _FULL, _CONV]},
    ),
    "lfm3": Architecture(
        "Lfm3Config",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": [_CONV, _CONV, _FULL, _CONV, _SLIDING, _CONV],
        },
    ),
    "mamba2": Architecture(
        "Mamba2Config",
        {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3Config", {**_MLA, **_SHARED, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    ),
    "minimax": Architecture(
        "MiniMaxConfig",
        {"layer_types": [_LINEAR, _FULL] * 2, "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "jamba": Architecture(
        "JambaConfig",
        {
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "falcon_mamba": Architecture("FalconMambaConfig", {"num_hidden_layers": 3, "state_size": 16, "expand": 2}),
}
REFUSED: dict[str, Architecture] = {
    "recurrent_gemma": Architecture(
        "RecurrentGemmaConfig",
        {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": 64, "num_key_value_heads": 1},
    ),
    "deepseek_v32": Architecture(
        "DeepseekV32Config",
        {**_MLA, **_SHARED, "q_lora_rank": 32, "index_topk": 8, "index_head_dim": 32, "index_n_heads": 2},
    ),
    "deepseek_v4": Architecture("DeepseekV4Config", {**_SHARED, "num_key_value_heads": 1, "q_lora_rank": 32}),
}


def make_config(name: str, context_tokens: int = CONTEXT, **changes: Any) -> Any:
    """The configuration of architecture `name` with `changes`, without the common settings it does not know."""
    import transformers

    architecture = {**ARCHITECTURES, **REFUSED}[name]
    config_class: Any = getattr(transformers, architecture.config)
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    common = {key: value for key, value in _COMMON.items() if key in known}
    if "max_position_embeddings" in common:
        common["max_position_embeddings"] = context_tokens
    return config_class(**{**common, **architecture.settings, **changes})


def make_model(name: str, context_tokens: int = CONTEXT, **changes: Any) -> Any:
    """The model of architecture `name`, with weights that make greedy output vary."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(make_config(name, context_tokens, **changes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight_name, weight in net.named_parameters():
            # Decay rates and convolutions only make sense as they were initialised.
            if weight.dim() >= 2 and "conv" not in weight_name and "A_log" not in weight_name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
        embedding = net.get_input_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape, generator=generator))
    return net


def save_model(name: str, folder: Path, context_tokens: int = CONTEXT, **changes: Any) -> None:
    """A model folder as `farfill model fetch` makes it."""
    make_model(name, context_tokens, **changes).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
