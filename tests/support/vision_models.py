"""Tiny vision-language models with seeded random weights, their processors, and images for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from farfill.engine.fake import EOS_ID, byte_tokenizer

CONTEXT = 1024
WINDOW = 48

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
_SMOL_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    **{f"tile_{row}_{col}": f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)},
}
_GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_LFM_TOKENS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
    **{f"tile_{row}_{col}": f"<|img_row_{row}_col_{col}|>" for row in (1, 2) for col in (1, 2)},
}
TOKENS = {
    "qwen2_5_vl": _QWEN_TOKENS,
    "qwen3_5": _QWEN_TOKENS,
    "smolvlm": _SMOL_TOKENS,
    "gemma3": _GEMMA_TOKENS,
    "lfm2_vl": _LFM_TOKENS,
}
# What a chat template writes for an image.
PLACEHOLDERS = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
    "lfm2_vl": "<image>",
}
_PREPROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
    },
    "qwen3_5": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 64},
    },
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}},
    "lfm2_vl": {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": 8,
        "tile_size": 32,
        "max_tiles": 4,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "max_pixels_tolerance": 1.25,
    },
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_of(name: str) -> Tokenizer:
    """Bytes, and the special tokens of the model."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(TOKENS[name].values()))
    return tokenizer


def make_config(name: str) -> Any:
    """The configuration of one model."""
    import transformers as hf

    tokenizer = tokenizer_of(name)
    ids = {key: tokenizer.token_to_id(token) for key, token in TOKENS[name].items()}
    text = {**_TEXT, "vocab_size": tokenizer.get_vocab_size()}
    if name in ("qwen2_5_vl", "qwen3_5"):
        special = {
            "image_token_id": ids["image_token"],
            "video_token_id": ids["video_token"],
            "vision_start_token_id": ids["vision_bos_token"],
            "vision_end_token_id": ids["vision_eos_token"],
            "tie_word_embeddings": False,
        }
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        if name == "qwen2_5_vl":
            tower = {**_QWEN_TOWER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
            return hf.Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=tower, **special)
        rope |= {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5, "mrope_interleaved": True}
        delta = {
            "head_dim": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        tower = {**_QWEN_TOWER, "patch_size": 16, "num_position_embeddings": 64}
        return hf.Qwen3_5Config(text_config={**text, **delta, "rope_parameters": rope}, vision_config=tower, **special)
    if name == "smolvlm":
        return hf.SmolVLMConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={**_TOWER, "image_size": 64, "patch_size": 16},
            image_token_id=ids["image_token"],
            scale_factor=2,
            tie_word_embeddings=False,
        )
    if name == "gemma3":
        gemma = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "num_hidden_layers": 6}
        return hf.Gemma3Config(
            text_config={**text, **gemma},
            vision_config={**_TOWER, "image_size": 64, "patch_size": 16},
            mm_tokens_per_image=16,
            image_token_index=ids["image_token"],
            boi_token_index=ids["boi_token"],
            eoi_token_index=ids["eoi_token"],
            tie_word_embeddings=False,
        )
    layers = ["conv", "conv", "full_attention", "conv"]
    return hf.Lfm2VlConfig(
        text_config={**text, "model_type": "lfm2", "layer_types": layers, "block_auto_adjust_ff_dim": False},
        vision_config={**_TOWER, "model_type": "siglip2_vision_model", "num_patches": 64, "patch_size": 8},
        image_token_id=ids["image_token"],
        downsample_factor=2,
        projector_hidden_size=32,
        tie_word_embeddings=False,
    )


def make_model(name: str) -> Any:
    """The model, with weights that make greedy output vary and images matter."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    net = AutoModelForImageTextToText.from_config(make_config(name)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight_name, weight in net.named_parameters():
            if weight.dim() == 2 and "conv" not in weight_name and "A_log" not in weight_name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
        embedding = net.get_input_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape, generator=generator))
    return net


def save_model(name: str, folder: Path, net: Any = None) -> None:
    """A model folder as one gets it from a hub: weights (of `net`), tokenizer, processor, chat template."""
    from transformers import PreTrainedTokenizerFast

    (make_model(name) if net is None else net).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(name), extra_special_tokens=TOKENS[name])
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[name]))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSORS[name]))
    extra = {"smolvlm": {"image_seq_len": 4}, "gemma3": {"image_seq_length": 16}}.get(name, {})
    (folder / "processor_config.json").write_text(json.dumps(extra))


def image_file(seed: int, size: tuple[int, int] = (96, 64), kind: str = "PNG") -> bytes:
    """An image of coarse noise as a file."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).resize(size, Image.Resampling.NEAREST).save(out, kind)
    return out.getvalue()
