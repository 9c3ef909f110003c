"""Tiny seeded models in folders that vLLM can serve: six families, each with another kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from support import vision_models

VOCABULARY = 320
_SPECIAL = ("<bos>", "<eos>", "<pad>", "<unk>")
# vLLM's kernels want heads of at least 32; weights wide enough that greedy text is not one token again and again.
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_BASE, head_dim=32),
    "qwen3": lambda: transformers.Qwen3Config(**_BASE, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**_BASE, "num_hidden_layers": 6},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=128,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    "granite": lambda: transformers.GraniteMoeHybridConfig(
        **_BASE,
        **_MAMBA,
        layer_types=["mamba"] * 3 + ["attention"],
        mamba_expand=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=128,
        position_embedding_type="rope",
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(**_BASE, **_MAMBA, head_dim=32, mamba_d_ssm=256),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_BASE, **_LINEAR, head_dim=64),
}


_VISION_TEXT: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
_VISION: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {
        "text": {"rope_parameters": _MROPE},
        "tower": {"hidden_size": 64, "num_heads": 2, "out_hidden_size": 128},
    },
    "gemma3_vl": {
        "text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128, "vocab_size": 288},
        "tower": {"hidden_size": 64},
    },
}


def make_model(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Weights, config and a byte-level tokenizer of model `name`, the same at every call."""
    if name in _VISION:
        return make_vision_model(name, folder)
    config = CONFIGS[name]()
    config.dtype = dtype
    model = AutoModelForCausalLM.from_config(config)
    seed_weights(model)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def make_vision_model(name: str, folder: Path) -> Path:
    """Likewise a model that takes images, with its processor: the embedded engine's, wide enough for vLLM's kernels."""
    family = name.removesuffix("_vl") if name == "gemma3_vl" else name
    config = vision_models.make_config(family)
    for key, value in {**_VISION_TEXT, **_VISION[name].get("text", {})}.items():
        setattr(config.text_config, key, value)
    for key, value in _VISION[name].get("tower", {}).items():
        setattr(config.vision_config, key, value)
    model = AutoModelForImageTextToText.from_config(config)
    seed_weights(model)
    vision_models.save_model(family, folder, model)
    if family == "gemma3":
        _as_published(folder)
    return folder


def _as_published(folder: Path) -> None:
    """What vLLM expects of Gemma 3: tokens for blank lines, and the vision tower's weights under their older names."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    tower = "vision_tower."
    save_file(
        {key.replace(tower, f"{tower}vision_model.") if tower in key else key: w for key, w in weights.items()},
        path,
        {"format": "pt"},
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    tokenizer.save(str(folder / "tokenizer.json"))


def seed_weights(model: Any) -> None:
    """Weights that make greedy text vary."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() >= 2:
                scale = 0.5 if "conv" in key else 1.6 / weight.shape[-1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def _tokenizer() -> PreTrainedTokenizerFast:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate([*pieces, *_SPECIAL])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad, unknown = _SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unknown
    )
    fast.chat_template = "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant:"
    return fast
