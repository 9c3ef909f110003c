"""What both renderers share: usage, SSE framing, logprob texts, and the `Renderer` protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from farfill.wire.control import LogprobMessage, TokensEvent

DONE = b"data: [DONE]\n\n"
_MARK = "text"

encode = msgspec.json.Encoder().encode

TokenLogprobs = tuple[LogprobMessage, list[LogprobMessage]]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """OpenAI's usage object. `cached_tokens` ≤ `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(slots=True)
class ChoiceResult:
    """One finished choice, gathered from its events."""

    index: int
    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, event: TokensEvent) -> None:
        """Append what `event` brought."""
        self.texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            self.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.stop_reason = event.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a renderer must know of the request. `echo_texts` is empty unless prompts are echoed."""

    request_id: str
    created: int
    model: str
    choices_per_prompt: int
    prompt_token_ids: tuple[list[int], ...]
    return_token_ids: bool
    logprobs: bool
    include_usage: bool
    echo_texts: tuple[str, ...] = ()

    def prompt_of(self, index: int) -> int:
        """Which prompt choice `index` belongs to."""
        return index // self.choices_per_prompt

    @property
    def chunk_usage(self) -> UnsetType | None:
        """`usage` of ordinary chunks: null when a usage chunk will follow, else absent."""
        return None if self.include_usage else UNSET


class Renderer(Protocol):
    """Turns events into the bytes of one endpoint's answer."""

    def begin(self, index: int) -> bytes:
        """SSE events that open choice `index` (may be empty)."""
        ...

    def chunk(self, index: int, event: TokensEvent) -> bytes:
        """The SSE event of new output (empty when there is nothing to tell yet)."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The SSE event with the usage, without choices."""
        ...

    def whole(self, choices: list[ChoiceResult], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...


def make_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Usage whose numbers are consistent whatever a worker reported."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(min(cached_tokens, prompt_tokens)),
    )


class PlainEvents:
    """Events of which all but one text is always the same: what `sse(event_of(text))` gives, without the work."""

    def __init__(self, event_of: Callable[[str], msgspec.Struct]) -> None:
        # The last one: names before it may be anything.
        self.before, _, self.after = sse(event_of(_MARK)).rpartition(encode(_MARK))
        """What stands around the text, which is to be encoded."""


def sse(message: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(message) + b"\n\n"


def token_text(token: LogprobMessage, prefix: str = "") -> str:
    """The token as text; one that is no text by itself is told as escaped bytes after `prefix`, as OpenAI does."""
    try:
        return token.text_bytes.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token.text_bytes)


def nothing_new(event: TokensEvent, text: str, return_token_ids: bool) -> bool:
    """Whether a client would learn nothing from `event`, of which `text` is shown (some may be held back)."""
    return not text and event.finish_reason is None and event.logprobs is None and not return_token_ids
