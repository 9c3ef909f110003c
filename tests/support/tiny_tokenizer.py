"""A model folder with a tokenizer of 256 bytes and a few special tokens: every text round-trips, one token a byte."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_folder(
    folder: Path, *, context_tokens: int = 512, chat_template: str | None = CHAT_TEMPLATE, vision: bool = False
) -> Path:
    """Write tokenizer.json, its config, config.json and (unless None) the chat template into `folder`.

    `vision`: the model is one that takes images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config: dict[str, object] = {"max_position_embeddings": context_tokens, "vocab_size": 256 + len(SPECIALS)}
    if vision:
        config["vision_config"] = {}
    (folder / "config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
