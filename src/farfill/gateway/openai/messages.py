"""Chat messages as the template sees them: roles, text, tool calls and their results, earlier reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from farfill.core.errors import InvalidRequestError
from farfill.gateway.media import ImageRef
from farfill.gateway.openai.requests import ChatMessageBody, ContentPart, ToolCallBody

TemplateMessage = Mapping[str, Any]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MUST_BE_EMPTY = ("function_call", "audio")


def template_messages(
    messages: Sequence[ChatMessageBody], images: list[ImageRef] | None = None, param: str = "messages"
) -> list[TemplateMessage]:
    """Each message as {"role", "content"} and what belongs to its role; `developer` is OpenAI's newer name of `system`.

    Arguments of tool calls become objects, as templates of open models want them. Raises InvalidRequestError for roles
    and content this server would otherwise drop. Images are appended to `images`, in order, and stay in their message
    as parts {"type": "image"}; None: there may be none.
    """
    if not messages:
        raise InvalidRequestError(f"{param} is empty", param=param)
    return [_message(message, f"{param}[{i}]", images) for i, message in enumerate(messages)]


def _message(message: ChatMessageBody, where: str, images: list[ImageRef] | None) -> TemplateMessage:
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
    if role == "tool" and not message.tool_call_id:
        raise InvalidRequestError(
            f"{where}.tool_call_id is missing: which call does it answer?", param=f"{where}.tool_call_id"
        )
    if message.tool_call_id and role != "tool":
        raise InvalidRequestError(f"{where}: only role 'tool' has a tool_call_id", param=f"{where}.tool_call_id")
    rendered: dict[str, Any] = {"role": role, "content": _content(message, where, images)}
    if message.tool_calls:
        rendered["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    if role == "tool":
        rendered |= {"tool_call_id": message.tool_call_id, "name": message.name or ""}
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


def _content(message: ChatMessageBody, where: str, images: list[ImageRef] | None) -> str | list[dict[str, str]]:
    """Text; with images, a list of parts."""
    if message.content is None:
        if message.tool_calls:
            return ""
        raise InvalidRequestError(f"{where}.content is missing", param=f"{where}.content")
    if isinstance(message.content, str):
        return message.content
    parts = [_part(part, f"{where}.content[{i}]", images) for i, part in enumerate(message.content)]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _part(part: ContentPart, where: str, images: list[ImageRef] | None) -> dict[str, str]:
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type != "image_url":
        raise InvalidRequestError(
            f"{where} has type {part.type!r}; text and image_url are supported here",
            param=where,
            reason="unsupported" if part.type == "text" else "unsupported_media",
        )
    url = part.image_url if isinstance(part.image_url, str) else getattr(part.image_url, "url", "")
    if not url:
        raise InvalidRequestError(f"{where}.image_url.url is missing", param=f"{where}.image_url.url")
    if images is None:
        raise InvalidRequestError(
            f"{where} is an image; this model takes text only", param=where, reason="unsupported_media"
        )
    images.append(ImageRef(url, f"{where}.image_url.url"))
    return {"type": "image"}
