"""The `tools` of a chat request: what may be called, and whether something must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from farfill.core.errors import InvalidRequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class ToolChoice(StrEnum):
    """What the model may do: only text, either, or a call for certain (of any tool, or of the one that is left)."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class FunctionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    function: FunctionBody | None = None


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    function: NamedFunction | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function; `parameters` is the JSON schema of its arguments, an object. `param` names it in complaints."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    param: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """`callable_tools` is what the choice leaves; `shown` goes to the template, all tools or (choice none) nothing."""

    choice: ToolChoice
    callable_tools: tuple[Tool, ...]
    shown: list[dict[str, Any]] | None
    parallel: bool


def tool_request(
    tools: Sequence[ToolBody] | None, choice: str | NamedChoice | None, parallel: bool | None
) -> ToolRequest | None:
    """The checked request; None when there are no tools. Raises InvalidRequestError naming the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"{len(tools)} tools, at most {MAX_TOOLS}", param="tools")
    known = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in known]
    if len(set(names)) < len(names):
        raise InvalidRequestError("two tools have the same name", param="tools")
    kind, chosen = _choice(choice, known)
    shown = None if kind is ToolChoice.NONE else [_shown(tool) for tool in tools]
    return ToolRequest(choice=kind, callable_tools=chosen, shown=shown, parallel=parallel is not False)


def _choice(choice: str | NamedChoice | None, known: tuple[Tool, ...]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    if choice is None:
        return ToolChoice.AUTO, known
    if isinstance(choice, str):
        if choice not in list(ToolChoice):
            raise InvalidRequestError(
                f"tool_choice {choice!r} is not none, auto, required or a named function", param="tool_choice"
            )
        kind = ToolChoice(choice)
        return kind, () if kind is ToolChoice.NONE else known
    if choice.type != "function" or choice.function is None:
        raise InvalidRequestError(
            f"tool_choice of type {choice.type!r} is not supported here; use 'function'",
            param="tool_choice",
            reason="unsupported",
        )
    named = tuple(tool for tool in known if tool.name == choice.function.name)
    if not named:
        raise InvalidRequestError(f"tool_choice names {choice.function.name!r}, which is no tool", param="tool_choice")
    return ToolChoice.REQUIRED, named


def _tool(tool: ToolBody, where: str) -> Tool:
    function = tool.function
    if tool.type == "function" and function is None:
        raise InvalidRequestError(f"{where}.function is missing", param=f"{where}.function")
    if tool.type != "function" or function is None:
        raise InvalidRequestError(
            f"{where} of type {tool.type!r} is not supported here; use 'function'", param=where, reason="unsupported"
        )
    if not _NAME.fullmatch(function.name):
        raise InvalidRequestError(
            f"{where}.function.name has 1 to 128 letters, digits, '_', '.' or '-', got {function.name!r}",
            param=f"{where}.function.name",
        )
    parameters = function.parameters if function.parameters is not None else {"type": "object", "properties": {}}
    param = f"{where}.function.parameters"
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequestError(f"{param} must describe an object", param=param)
    return Tool(function.name, {"type": "object", **parameters}, bool(function.strict), param)


def _shown(tool: ToolBody) -> dict[str, Any]:
    """As the client wrote it, without what it left out: templates print it into the prompt."""
    function = tool.function
    assert function is not None
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
