"""Tiny seeded models, written once a session: real architectures, thousands of tokens in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CONTEXT_TOKENS = 8192
WINDOW_TOKENS = 48

_CHAT_TEMPLATE = (
    "{% if tools %}<s>tools\n{{ tools | tojson }}, called in <tool_call></tool_call></s>{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "</s>{% endfor %}"
    "<s>assistant\n"
)
_SPECIALS = ("<pad>", "<s>", "</s>")


def write_hybrid(folder: Path) -> Path:
    """A Gemma 3 of six layers: sliding windows of 48 tokens with full attention in every third."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        vocab_size=len(_SPECIALS) + 256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW_TOKENS,
        layer_types=kinds,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.2,
        tie_word_embeddings=False,  # tied random weights only repeat the last token
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _write(folder, Gemma3ForCausalLM, config)


def write_full_attention(folder: Path) -> Path:
    """A Llama of four layers: full attention only, 1 KiB of float32 KV a token."""
    config = LlamaConfig(
        vocab_size=len(_SPECIALS) + 256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _write(folder, LlamaForCausalLM, config)


def write_mid_sized(folder: Path) -> Path:
    """A Llama of eight layers that computes some thousand tokens a second, with 2 KiB of float32 KV a token."""
    config = LlamaConfig(
        vocab_size=len(_SPECIALS) + 256,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _write(folder, LlamaForCausalLM, config)


def _write(folder: Path, kind: type[PreTrainedModel], config: LlamaConfig | Gemma3TextConfig) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(20261130)
        model = kind(config)
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after three specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate((*_SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_CHAT_TEMPLATE,
    )
