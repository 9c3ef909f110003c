"""The ways open models write tool calls: how a chat template shows which, how each is parsed, and its grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from farfill.core.errors import InvalidRequestError
from farfill.gateway.openai.call_bodies import CallBody, JsonCall, NamedCall, TaggedCall
from farfill.gateway.openai.call_parser import CallParser, CallSyntax
from farfill.gateway.openai.lark import Rules, json_value, literal
from farfill.gateway.openai.tools import Tool

_DS_GROUP, _DS_GROUP_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_SEP, _DS_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIMI_GROUP, _KIMI_GROUP_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls.

    `signs`: a template with all of these texts teaches it. `lead` is the marker a group of calls begins with, empty
    when a bare brace does. `one` adds the rule of a single call of a tool; `group` is the grammar of what follows the
    lead, given the rule of any single call and whether there may be several.
    """

    name: str
    signs: tuple[str, ...]
    syntax: CallSyntax
    body: Callable[[Sequence[Tool]], CallBody]
    lead: str
    one: Callable[[Rules, Tool], str]
    group: Callable[[Rules, str, bool], str]
    other_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which must then stay in the output until it was parsed."""
        texts = (self.lead, self.syntax.begin, self.syntax.end, *self.syntax.noise, *self.other_markers)
        return tuple(text for text in texts if text)

    def parser(self, tools: Sequence[Tool]) -> CallParser:
        """A parser for one choice."""
        return CallParser(self.syntax, lambda: self.body(tools), [tool.name for tool in tools])

    def demanded(self, rules: Rules, tools: Sequence[Tool], *, parallel: bool) -> str:
        """A rule of nothing but valid calls, at least one."""
        lead = f"{rules.mark(self.lead)} " if self.lead else ""
        return rules.add("calls", lead + self._group(rules, tools, parallel=parallel))

    def possible(self, rules: Rules, tools: Sequence[Tool], *, parallel: bool) -> str:
        """A rule of free text in which whatever begins like a call is a valid one."""
        group = self._group(rules, tools, parallel=parallel)
        if not self.lead:
            other_text = rules.add("text", "/([^{ \\t\\r\\n](.|\\n)*)?/")
            return rules.add("free", f"{group} | {other_text}")
        called = rules.add("called", f"{rules.before(self.lead)} {group}")
        text = rules.any_text()
        return rules.add("free", f"{called}* {text}" if parallel else f"{called} | {text}")

    def _group(self, rules: Rules, tools: Sequence[Tool], *, parallel: bool) -> str:
        one = rules.add("one", " | ".join(self.one(rules, tool) for tool in tools))
        return rules.add("group", self.group(rules, one, parallel))


def _several(first: str, more: str, parallel: bool) -> str:
    return f"{first} ({more})*" if parallel else first


def _arguments(rules: Rules, tool: Tool) -> str:
    return rules.add("arguments", json_value(tool.parameters))


def _json_call(key: str) -> Callable[[Rules, Tool], str]:
    def one(rules: Rules, tool: Tool) -> str:
        head = literal(f'{{"name": "{tool.name}", "{key}": ')
        return rules.add("call", f'{head} {_arguments(rules, tool)} "}}"')

    return one


def _named_call(before: str, separator: str) -> Callable[[Rules, Tool], str]:
    def one(rules: Rules, tool: Tool) -> str:
        head = literal(before + tool.name)
        return rules.add("call", f"{head} {rules.mark(separator)} {_arguments(rules, tool)}")

    return one


def _fenced_call(rules: Rules, tool: Tool) -> str:
    head, fence = literal(tool.name + "\n```json\n"), literal("\n```")
    return rules.add("call", f'"function" {rules.mark(_DS_SEP)} {head} {_arguments(rules, tool)} {fence}')


def _kimi_call(rules: Rules, tool: Tool) -> str:
    head = literal(f"functions.{tool.name}:")
    return rules.add("call", f"{head} /[0-9]+/ {rules.mark(_KIMI_ARGUMENTS)} {_arguments(rules, tool)}")


def _mistral_call(rules: Rules, tool: Tool) -> str:
    named = rules.mark("[ARGS]").startswith("<[")
    return (_named_call("", "[ARGS]") if named else _json_call("arguments"))(rules, tool)


def _mistral_group(rules: Rules, one: str, parallel: bool) -> str:
    if rules.mark("[ARGS]").startswith("<["):
        return _several(one, f"{rules.mark('[TOOL_CALLS]')} {one}", parallel)
    calls = _several(one, f'", " {one}', parallel)
    return f'"[" {calls} "]"'


def _tagged_call(rules: Rules, tool: Tool) -> str:
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or []
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    parts: list[str] = []
    for key, schema in properties.items():
        value = _tagged_value(rules, tool, key, schema, shared)
        head = literal(f"<parameter={key}>\n")
        part = rules.add("parameter", f"{head} {value}")
        parts.append(part if key in required else f"{part}?")
    head = literal(f"<function={tool.name}>\n")
    return rules.add("call", " ".join((head, *parts, '"</function>"')))


_TEXT_KEYWORDS = {"type", "title", "description", "default", "examples", "enum", "const", "minLength", "maxLength"}


def _tagged_value(rules: Rules, tool: Tool, key: str, schema: Any, shared: dict[str, Any]) -> str:
    """One parameter's value up to and with its closing tag: text is written without quotes, all else as JSON."""
    close = "\n</parameter>\n"
    if not isinstance(schema, dict) or schema.get("type") != "string":
        value = json_value({**(schema if isinstance(schema, dict) else {}), **shared})
        return f"{rules.add('value', value)} {literal(close)}"
    if unknown := sorted(set(schema) - _TEXT_KEYWORDS):
        raise InvalidRequestError(
            f"{tool.param}.properties.{key}: {unknown[0]} of a text cannot be held to in this model's tool calls",
            param=tool.param,
            reason="unsupported",
        )
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        return f"({' | '.join(literal(str(choice)) for choice in choices)}) {literal(close)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    length = f"{{{least},{most}}}" if least or most != "" else "*"
    return rules.add("value", f"/(.|\\n){length}/", f"[suffix={json.dumps(close)}]")


def _xml_group(rules: Rules, one: str, parallel: bool) -> str:
    begin, end = rules.mark("<tool_call>"), rules.mark("</tool_call>")
    line = literal("\n")
    call = f"{line} {one} {line} {end}"
    return _several(call, f"{line} {begin} {call}", parallel)


def _deepseek_group(rules: Rules, one: str, parallel: bool) -> str:
    call = f"{rules.mark(_DS_CALL)} {one} {rules.mark(_DS_CALL_END)}"
    return f"{_several(call, call, parallel)} {rules.mark(_DS_GROUP_END)}"


def _deepseek_v3_group(rules: Rules, one: str, parallel: bool) -> str:
    call = f"{rules.mark(_DS_CALL)} {one} {rules.mark(_DS_CALL_END)}"
    calls = _several(call, f'"\\n" {call}', parallel)
    return f"{calls} {rules.mark(_DS_GROUP_END)}"


def _kimi_group(rules: Rules, one: str, parallel: bool) -> str:
    call = f"{rules.mark(_KIMI_CALL)} {one} {rules.mark(_KIMI_CALL_END)}"
    return f"{_several(call, call, parallel)} {rules.mark(_KIMI_GROUP_END)}"


_DEEPSEEK_V3_SYNTAX = CallSyntax(
    begin=_DS_CALL, end="```" + _DS_CALL_END, noise=(_DS_CALL_END, _DS_GROUP, _DS_GROUP_END)
)
_DEEPSEEK_SYNTAX = CallSyntax(begin=_DS_CALL, end=_DS_CALL_END, noise=(_DS_GROUP, _DS_GROUP_END))

FORMATS = (
    ToolFormat(
        name="qwen3_coder",
        signs=("<tool_call>", "<function="),
        syntax=CallSyntax(begin="<tool_call>", end="</tool_call>"),
        body=lambda tools: TaggedCall({tool.name: tool.parameters for tool in tools}),
        lead="<tool_call>",
        one=_tagged_call,
        group=_xml_group,
    ),
    ToolFormat(
        name="hermes",
        signs=("<tool_call>",),
        syntax=CallSyntax(begin="<tool_call>", end="</tool_call>"),
        body=lambda tools: JsonCall(),
        lead="<tool_call>",
        one=_json_call("arguments"),
        group=_xml_group,
    ),
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        syntax=CallSyntax(begin="[TOOL_CALLS]", listed=True, short_ids=True),
        body=lambda tools: NamedCall(""),
        lead="[TOOL_CALLS]",
        one=_mistral_call,
        group=_mistral_group,
        other_markers=("[ARGS]", "[CALL_ID]"),
    ),
    ToolFormat(
        name="deepseek_v3",
        signs=(_DS_CALL, "```json"),
        syntax=_DEEPSEEK_V3_SYNTAX,
        body=lambda tools: NamedCall("```json", prefix="function" + _DS_SEP),
        lead=_DS_GROUP,
        one=_fenced_call,
        group=_deepseek_v3_group,
        other_markers=(_DS_SEP,),
    ),
    ToolFormat(
        name="deepseek_v31",
        signs=(_DS_CALL,),
        syntax=_DEEPSEEK_SYNTAX,
        body=lambda tools: NamedCall(_DS_SEP),
        lead=_DS_GROUP,
        one=_named_call("", _DS_SEP),
        group=_deepseek_group,
        other_markers=(_DS_SEP,),
    ),
    ToolFormat(
        name="kimi_k2",
        signs=(_KIMI_CALL,),
        syntax=CallSyntax(begin=_KIMI_CALL, end=_KIMI_CALL_END, noise=(_KIMI_GROUP, _KIMI_GROUP_END)),
        body=lambda tools: NamedCall(_KIMI_ARGUMENTS),
        lead=_KIMI_GROUP,
        one=_kimi_call,
        group=_kimi_group,
        other_markers=(_KIMI_ARGUMENTS,),
    ),
    ToolFormat(
        name="llama3_json",
        signs=('"parameters": dictionary of argument name and its value',),
        syntax=CallSyntax(begin="<|python_tag|>", separator=";", bare=True),
        body=lambda tools: JsonCall([tool.name for tool in tools]),
        lead="",
        one=_json_call("parameters"),
        group=lambda rules, one, parallel: _several(one, f'"; " {one}', parallel),
    ),
)
"""In the order in which a template is searched for their signs."""


def tool_format(choice: str, template: str) -> ToolFormat | None:
    """The format named by `model.tool_parser`; with auto, the one the template teaches; None: no tools."""
    if choice == "none":
        return None
    if choice == "auto":
        return next((known for known in FORMATS if all(sign in template for sign in known.signs)), None)
    return next(known for known in FORMATS if known.name == choice)
