"""Answers of /v1/completions."""

from __future__ import annotations

import codecs
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from farfill.gateway.openai.render import (
    ChoiceResult,
    PlainEvents,
    Rendering,
    TokenLogprobs,
    Usage,
    encode,
    nothing_new,
    sse,
    token_text,
)
from farfill.wire.control import TokensEvent


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """OpenAI's older shape: parallel lists. `text_offset` counts characters in the choice's text.

    A token that is part of a character is told as `bytes:` and its escaped bytes.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Whole answers and stream chunks have the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


class CompletionRenderer:
    """`Renderer` of text completions; choices of prompt p are numbered from p × n."""

    def __init__(self, rendering: Rendering) -> None:
        self._r = rendering
        self._id = f"cmpl-{rendering.request_id}"
        self._plain: dict[int, PlainEvents] = {}
        self._offsets: dict[int, _TextOffset] = {}

    def begin(self, index: int) -> bytes:
        echo = self._echo(index)
        if not echo and not self._r.return_token_ids:
            return b""
        ids: list[int] | UnsetType = [] if self._r.return_token_ids else UNSET
        choice = CompletionChoice(index=index, text=echo, token_ids=ids, prompt_token_ids=self._prompt_ids(index))
        return sse(self._message([choice], self._r.chunk_usage))

    def chunk(self, index: int, event: TokensEvent) -> bytes:
        plain = self._plain.get(index)
        if plain is None:
            plain = self._plain[index] = self._plain_events(index)
        bare = event.finish_reason is None and event.stop_reason is None and event.logprobs is None
        if bare and not self._r.return_token_ids:
            text = event.text
            return plain.before + encode(text) + plain.after if text else b""
        if nothing_new(event, event.text, self._r.return_token_ids):
            return b""
        choice = CompletionChoice(
            index=index,
            text=event.text,
            logprobs=self._logprobs(index, event.logprobs) if event.logprobs is not None else None,
            finish_reason=event.finish_reason,
            stop_reason=event.stop_reason,
            token_ids=event.token_ids if self._r.return_token_ids else UNSET,
        )
        return sse(self._message([choice], self._r.chunk_usage))

    def usage(self, usage: Usage) -> bytes:
        return sse(self._message([], usage))

    def _plain_events(self, index: int) -> PlainEvents:
        def event(text: str) -> Completion:
            return self._message([CompletionChoice(index=index, text=text)], self._r.chunk_usage)

        return PlainEvents(event)

    def whole(self, choices: list[ChoiceResult], usage: Usage) -> bytes:
        return encode(self._message([self._choice(c) for c in choices], usage))

    def _choice(self, choice: ChoiceResult) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=self._echo(choice.index) + choice.text,
            logprobs=self._logprobs(choice.index, choice.logprobs) if self._r.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._r.return_token_ids else UNSET,
            prompt_token_ids=self._prompt_ids(choice.index),
        )

    def _message(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._r.created, model=self._r.model, choices=choices, usage=usage)

    def _echo(self, index: int) -> str:
        return self._r.echo_texts[self._r.prompt_of(index)] if self._r.echo_texts else ""

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return self._r.prompt_token_ids[self._r.prompt_of(index)] if self._r.return_token_ids else UNSET

    def _logprobs(self, index: int, pairs: list[TokenLogprobs]) -> CompletionLogprobs:
        tokens: list[str] = []
        offsets: list[int] = []
        offset = self._offsets.setdefault(index, _TextOffset())
        for chosen, _ in pairs:
            tokens.append(token_text(chosen, "bytes:"))
            offsets.append(offset.chars)
            offset.add(chosen.text_bytes)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[chosen.logprob for chosen, _ in pairs],
            top_logprobs=[{token_text(t, "bytes:"): t.logprob for t in (*others, chosen)} for chosen, others in pairs],
            text_offset=offsets,
        )


class _TextOffset:
    """How many whole characters the tokens of a choice made so far."""

    def __init__(self) -> None:
        self.chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, text_bytes: bytes) -> None:
        self.chars += len(self._decoder.decode(text_bytes))
