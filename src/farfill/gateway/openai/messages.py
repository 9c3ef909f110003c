"""Chat messages as the template sees them: roles, text, tool calls and their results, earlier reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from farfill.core.errors import InvalidRequestError
from farfill.gateway.openai.requests import ChatMessageBody, ToolCallBody

TemplateMessage = Mapping[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MUST_BE_EMPTY = ("function_call", "audio")


def template_messages(messages: Sequence[ChatMessageBody], param: str = "messages") -> list[TemplateMessage]:
    """Each message as {"role", "content"} and what belongs to its role; `developer` is OpenAI's newer name of `system`.

    Arguments of tool calls become objects, as templates of open models want them. Raises InvalidRequestError for roles
    and content this server would otherwise drop.
    """
    if not messages:
        raise InvalidRequestError(f"{param} is empty", param=param)
    return [_message(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessageBody, where: str) -> TemplateMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(
            f"{where}.role {message.role!r} is not supported here; use {', '.join(_ROLES)}",
            param=f"{where}.role",
            reason="unsupported",
        )
    for name in _MUST_BE_EMPTY:
        if getattr(message, name):
            raise InvalidRequestError(
                f"{where}.{name} is not supported here", param=f"{where}.{name}", reason="unsupported"
            )
    if message.tool_calls and role != "assistant":
        raise InvalidRequestError(f"{where}: only an assistant has tool_calls", param=f"{where}.tool_calls")
    if message.tool_call_id and role != "tool":
        raise InvalidRequestError(f"{where}: only role 'tool' has a tool_call_id", param=f"{where}.tool_call_id")
    rendered: dict[str, Any] = {"role": role, "content": _text(message, where)}
    if message.tool_calls:
        rendered["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    if role == "tool":
        rendered |= {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and role == "assistant":
        rendered["reasoning_content"] = reasoning
    return rendered


def _tool_call(call: ToolCallBody, where: str) -> dict[str, Any]:
    if call.type != "function":
        raise InvalidRequestError(
            f"{where}.type {call.type!r} is not supported here; use 'function'",
            param=f"{where}.type",
            reason="unsupported",
        )
    param = f"{where}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{param} must hold a JSON object", param=param)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _text(message: ChatMessageBody, where: str) -> str:
    if message.content is None:
        if message.tool_calls:
            return ""
        raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for i, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(
                f"{where}.content[{i}] has type {part.type!r}; only text is supported here",
                param=f"{where}.content[{i}]",
                reason="unsupported",
            )
        texts.append(part.text)
    return "".join(texts)
