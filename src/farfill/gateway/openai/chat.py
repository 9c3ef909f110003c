"""Answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from farfill.gateway.openai.assistant import AssistantParser, NewParser
from farfill.gateway.openai.call_parser import CallDelta
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


class Function(msgspec.Struct, kw_only=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(msgspec.Struct, kw_only=True):
    """`content` is null when there are only calls; `reasoning_content` is there for models that reason."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first of a call has id, type and name; the arguments of all are to be joined."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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

    def __init__(self, rendering: Rendering, new_parser: NewParser) -> None:
        self._r = rendering
        self._new_parser = new_parser
        self._parsers: dict[int, AssistantParser] = {}
        self._plain: dict[int, PlainEvents] = {}
        """Of choices whose text is content as it comes: what brings nothing else, save perhaps unasked token ids."""
        self._id = f"chatcmpl-{rendering.request_id}"

    def begin(self, index: int) -> bytes:
        ids = self._r.prompt_token_ids[0] if self._r.return_token_ids and index == 0 else UNSET
        choice = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        return self._chunk([choice], self._r.chunk_usage, ids)

    def chunk(self, index: int, event: TokensEvent) -> bytes:
        plain = self._plain.get(index)
        if plain is not None and event.finish_reason is None and event.stop_reason is None and event.logprobs is None:
            text = event.text
            return plain.before + encode(text) + plain.after if text else b""
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._new_parser()
            if parser.plain and not self._r.return_token_ids:
                self._plain[index] = self._plain_events(index)
                return self.chunk(index, event)
        parsed = parser.push(event.text, event.finish_reason)
        shows = bool(parsed.content or parsed.reasoning or parsed.calls)
        if not shows and nothing_new(event, "", self._r.return_token_ids):
            return b""
        choice = ChatChunkChoice(
            index=index,
            delta=Delta(
                content=parsed.content if parsed.content or not shows else UNSET,
                reasoning_content=parsed.reasoning or UNSET,
                tool_calls=[_call_delta(call) for call in parsed.calls] or UNSET,
            ),
            logprobs=_logprobs(event.logprobs) if event.logprobs is not None else None,
            finish_reason=parser.finish_reason(event.finish_reason),
            stop_reason=UNSET if event.stop_reason is None else event.stop_reason,
            token_ids=event.token_ids if self._r.return_token_ids else UNSET,
        )
        return self._chunk([choice], self._r.chunk_usage)

    def usage(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def _plain_events(self, index: int) -> PlainEvents:
        def event(text: str) -> ChatChunk:
            return self._chunk_of([ChatChunkChoice(index=index, delta=Delta(content=text))], self._r.chunk_usage)

        return PlainEvents(event)

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
        parser = self._new_parser()
        parsed = parser.push(choice.text, choice.finish_reason or "stop")
        calls = _joined(parsed.calls)
        return ChatChoice(
            index=choice.index,
            message=Message(
                content=None if calls and not parsed.content else parsed.content,
                reasoning_content=(parsed.reasoning or None) if parser.separates_reasoning else UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=_logprobs(choice.logprobs) if self._r.logprobs else None,
            finish_reason=parser.finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._r.return_token_ids else UNSET,
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        return sse(self._chunk_of(choices, usage, prompt_token_ids))

    def _chunk_of(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._r.created,
            model=self._r.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )


def _call_delta(call: CallDelta) -> ToolCallDelta:
    return ToolCallDelta(
        index=call.index,
        id=UNSET if call.call_id is None else call.call_id,
        type=UNSET if call.call_id is None else "function",
        function=FunctionDelta(name=UNSET if call.name is None else call.name, arguments=call.arguments),
    )


def _joined(deltas: list[CallDelta]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None and delta.call_id is not None:
            calls.append(ToolCall(id=delta.call_id, function=Function(name=delta.name, arguments="")))
        calls[delta.index].function.arguments += delta.arguments
    return calls


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
