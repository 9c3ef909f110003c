"""Answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from farfill.gateway.openai.render import (
    ChoiceResult,
    Rendering,
    TokenLogprobs,
    Usage,
    encode,
    nothing_new,
    sse,
    token_text,
)
from farfill.wire.control import LogprobMessage, TokensEvent


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ContentLogprob]
    refusal: None = None


class Message(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatRenderer:
    """`Renderer` of chat completions. A chat request has exactly one prompt."""

    def __init__(self, rendering: Rendering) -> None:
        self._r = rendering
        self._id = f"chatcmpl-{rendering.request_id}"

    def begin(self, index: int) -> bytes:
        ids = self._r.prompt_token_ids[0] if self._r.return_token_ids and index == 0 else UNSET
        choice = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        return self._chunk([choice], self._r.chunk_usage, ids)

    def chunk(self, index: int, event: TokensEvent) -> bytes:
        if nothing_new(event, self._r.return_token_ids):
            return b""
        choice = ChatChunkChoice(
            index=index,
            delta=Delta(content=event.text),
            logprobs=_logprobs(event.logprobs) if event.logprobs is not None else None,
            finish_reason=event.finish_reason,
            stop_reason=UNSET if event.stop_reason is None else event.stop_reason,
            token_ids=event.token_ids if self._r.return_token_ids else UNSET,
        )
        return self._chunk([choice], self._r.chunk_usage)

    def usage(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, choices: list[ChoiceResult], usage: Usage) -> bytes:
        return encode(
            ChatCompletion(
                id=self._id,
                created=self._r.created,
                model=self._r.model,
                choices=[self._choice(c) for c in choices],
                usage=usage,
                prompt_token_ids=self._r.prompt_token_ids[0] if self._r.return_token_ids else UNSET,
            )
        )

    def _choice(self, choice: ChoiceResult) -> ChatChoice:
        return ChatChoice(
            index=choice.index,
            message=Message(content=choice.text),
            logprobs=_logprobs(choice.logprobs) if self._r.logprobs else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._r.return_token_ids else UNSET,
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        return sse(
            ChatChunk(
                id=self._id,
                created=self._r.created,
                model=self._r.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=prompt_token_ids,
            )
        )


def _logprobs(pairs: list[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ContentLogprob(
                token=token_text(chosen),
                logprob=chosen.logprob,
                bytes=list(chosen.text_bytes),
                top_logprobs=[_top(other) for other in others],
            )
            for chosen, others in pairs
        ]
    )


def _top(token: LogprobMessage) -> TopLogprob:
    return TopLogprob(token=token_text(token), logprob=token.logprob, bytes=list(token.text_bytes))
