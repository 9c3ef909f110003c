"""Text to token ids and back, from a model folder, without torch and without stalling the event loop.

`Tokenizer.encode` holds the GIL for the whole text; `encode_batch_fast` releases it, so long texts run in a
worker thread through it. Short ones are cheaper in place than a thread switch.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.gateway.template import ChatMessage, ChatTemplate

INLINE_CHARS = 2_000
INLINE_TOKENS = 500

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A model's tokenizer, chat template and limits. `chat_template` is None for base models. `takes_images`: as far as
    its configuration says; workers know better."""

    tokenizer: tokenizers.Tokenizer
    chat_template: ChatTemplate | None
    context_tokens: int
    vocab_size: int
    takes_images: bool = False
    growth: int | None = None
    """How many bytes the tokenizer makes of one at most before it cuts them into tokens; None: it cannot be told."""
    blanks: int = 0
    """It may put in front of a text."""

    def most_tokens(self, text: str, *, add_special_tokens: bool) -> int | None:
        """A bound for the tokens of `text`: none is less than a byte. None: there is no bound."""
        if self.growth is None:
            return None
        added = self.tokenizer.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        return len(text.encode("utf-8", "replace")) * self.growth + self.blanks + added

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Blocks; a long text releases the GIL while it works."""
        if len(text) < INLINE_CHARS:  # over in a millisecond, without a hand-over to the library's threads
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`. Blocks; releases the GIL while it works."""
        return self.tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def chat_text(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text; the template itself writes the special tokens, and the placeholders of images."""
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a prompt",
                param="messages",
                reason="no_chat_template",
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary entry of `token_id`, None when there is none."""
        return self.tokenizer.id_to_token(token_id)


class TokenizerPool:
    """Runs tokenizer work in a few threads of its own, so that long prompts queue behind each other only."""

    def __init__(self, threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def run(self, size: int, inline_below: int, work: Callable[[], T]) -> T:
        """Result of `work`, in place when `size` is below `inline_below`, else in a thread."""
        if size < inline_below:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for running work, drop the rest."""
        self._threads.shutdown(cancel_futures=True)


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Read tokenizer.json, tokenizer_config.json, config.json and the chat template of a model folder.

    Raises ConfigError naming the missing or broken file.
    """
    config = _read_json(folder / "config.json")
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"cannot load {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings_path = folder / "tokenizer_config.json"
    settings = _read_json(settings_path) if settings_path.exists() else {}
    text_config = config.get("text_config") or config
    context = text_config.get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise ConfigError(f"{folder / 'config.json'} has no max_position_embeddings: the context length is unknown")
    vocab = max(tokenizer.get_vocab_size(with_added_tokens=True), int(text_config.get("vocab_size") or 0))
    return LoadedTokenizer(
        tokenizer,
        _chat_template(folder, settings),
        context,
        vocab,
        "vision_config" in config,
        *_growth(tokenizer),
    )


def _growth(tokenizer: tokenizers.Tokenizer) -> tuple[int | None, int]:
    """`growth` by the normalizer, `blanks` by the pre-tokenizer.

    The greatest growth in UTF-8 of Unicode's forms: https://unicode.org/faq/normalization.html
    """
    written = json.loads(tokenizer.to_str())
    normalizer, cuts = written.get("normalizer"), json.dumps(written.get("pre_tokenizer"))
    growth = 1 if normalizer is None else {"NFC": 3, "NFKC": 11}.get(normalizer.get("type"))
    blank = '"add_prefix_space": true' in cuts or '"prepend_scheme": "' in cuts
    return growth, int(blank)


def _chat_template(folder: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    """chat_template.jinja wins over the one inside tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(settings))


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return loaded
