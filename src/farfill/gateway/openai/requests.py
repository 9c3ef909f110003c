"""The request bodies of OpenAI (with vLLM's additions) and how they are parsed.

Optional fields may be null, as OpenAI's clients send them. Types are checked here, ranges in `sampling`.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from farfill.core.errors import InvalidRequestError
from farfill.gateway.openai.fields import check_fields, decode_object, not_json
from farfill.gateway.openai.tools import NamedChoice, ToolBody

Request = TypeVar("Request", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`include_obfuscation` pads OpenAI's own stream against traffic analysis; there is nothing to pad here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`strict` or not, the output is held to the schema."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's way to ask for JSON."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's way to constrain output: exactly one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both generation endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: Any = None
    request_id: str | None = None
    return_token_ids: bool | None = None


class ImageUrl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`detail` chooses a resolution at OpenAI; open models have one of their own."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message: text, or the URL of an image."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str | None = None


class ToolCallBody(msgspec.Struct, kw_only=True):
    """A call the assistant made, as the answer told it; streamed ones carry an index."""

    id: str
    type: str = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessageBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. The last group is what clients echo from answers."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: Any = None
    audio: Any = None
    refusal: Any = None
    annotations: Any = None


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessageBody]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions. `prompt` is decoded apart: four shapes of arrays."""

    prompt: msgspec.Raw
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessageBody] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class _OnlyChatBody(ChatBody, kw_only=True, forbid_unknown_fields=True):
    """Without any field that is harmless or asks for nothing."""


class _OnlyCompletionBody(CompletionBody, kw_only=True, forbid_unknown_fields=True):
    """The same."""


_STRICT: dict[type, msgspec.json.Decoder[Any]] = {
    ChatBody: msgspec.json.Decoder(_OnlyChatBody),
    CompletionBody: msgspec.json.Decoder(_OnlyCompletionBody),
}


def parse(body: bytes, kind: type[Request]) -> Request:
    """`body` as `kind`. Raises InvalidRequestError naming the field at fault."""
    strict = _STRICT.get(kind)
    if strict is not None:
        try:
            return strict.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass  # other fields than ours, or a fault: below it gets its name
    check_fields(decode_object(body), kind.__struct_fields__)
    return _decode(body, kind)


def parse_prompts(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """The prompts of a completion request: text or token ids, one or many. Never empty."""
    data = bytes(raw).lstrip()
    if data[:1] == b'"':
        return [_decode_prompt(data, str)]
    first = data[1:65].lstrip()[:1] if data[:1] == b"[" else b""
    if first == b'"':
        return _decode_prompt(data, list[str])
    if first == b"[":
        return _decode_prompt(data, list[list[int]])
    if first == b"]" or not first:
        raise InvalidRequestError(
            "prompt must be a string, token ids, or a list of either, and not empty",
            param="prompt",
        )
    return [_decode_prompt(data, list[int])]


def _decode_prompt(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequestError(f"prompt: {_plain(error)}", param="prompt") from error


def _decode(body: bytes, kind: type[Request]) -> Request:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error))
        param = found["path"] or None if found else None
        if param is None:
            missing = re.search(r"missing required field `([^`]+)`", str(error))
            param = missing[1] if missing else None
        where = f"{param}: " if param else ""
        raise InvalidRequestError(f"{where}{_plain(error)}", param=param) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise not_json(body, error) from error


def _plain(error: Exception) -> str:
    return _PATH.sub("", str(error))
