"""Chat messages as the template sees them: plain role and text."""

from __future__ import annotations

from collections.abc import Sequence

from farfill.core.errors import InvalidRequestError
from farfill.gateway.openai.requests import ChatMessageBody

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MUST_BE_EMPTY = ("tool_calls", "tool_call_id", "function_call", "audio")


def template_messages(messages: Sequence[ChatMessageBody], param: str = "messages") -> list[dict[str, str]]:
    """Each message as {"role", "content"}; `developer` is OpenAI's newer name of `system`.

    Raises InvalidRequestError for roles and content this server would otherwise drop.
    """
    if not messages:
        raise InvalidRequestError(f"{param} is empty", param=param)
    return [_plain(message, f"{param}[{i}]") for i, message in enumerate(messages)]


def _plain(message: ChatMessageBody, where: str) -> dict[str, str]:
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
    return {"role": role, "content": _text(message, where)}


def _text(message: ChatMessageBody, where: str) -> str:
    if message.content is None:
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
