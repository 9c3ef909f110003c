"""What a model's template and tokenizer make of chat features: tools, reasoning, markers that are single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from farfill.core.errors import InvalidRequestError
from farfill.gateway.openai.assistant import AssistantParser
from farfill.gateway.openai.call_parser import CallParser
from farfill.gateway.openai.constrain import OutputGrammar, check, check_schema_depth, schema_grammar
from farfill.gateway.openai.lark import Rules, literal
from farfill.gateway.openai.reasoning import ReasoningFormat, ReasoningSplitter, reasoning_format
from farfill.gateway.openai.tool_formats import ToolFormat, tool_format
from farfill.gateway.openai.tools import ToolChoice, ToolRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """`tokens`: text and id of every added token; `hidden`: the special ones, which output normally leaves out."""

    tools: ToolFormat | None
    takes_tools: bool
    reasoning: ReasoningFormat | None
    tokens: Mapping[str, int]
    hidden: frozenset[str]

    def require_tools(self, request: ToolRequest) -> None:
        """Raises InvalidRequestError when calls of this model could not be understood, or a schema not be written."""
        for tool in request.callable_tools:
            check_schema_depth(tool.param, tool.parameters)
        if not self.takes_tools:
            raise InvalidRequestError("this model's chat template takes no tools", param="tools", reason="unsupported")
        if self.tools is None:
            raise InvalidRequestError(
                "how this model writes tool calls is not known; the operator may set model.tool_parser",
                param="tools",
                reason="unsupported",
            )

    def shows_markers(self, request: ToolRequest | None) -> bool:
        """Whether the engine must leave special tokens in the text, for the parser to see."""
        markers: set[str] = set()
        if self.reasoning is not None:
            markers |= {self.reasoning.begin, self.reasoning.end}
        if self.tools is not None and _may_call(request):
            markers.update(self.tools.markers)
        return bool(markers & self.hidden)

    def grammar(self, request: ToolRequest | None, output: OutputGrammar | None, *, opened: bool) -> str:
        """What the engine holds the output to; empty when it is free. `opened`: the prompt ends inside reasoning.

        Raises InvalidRequestError naming the field; blocks up to a second for each schema: run it in a thread.
        """
        if output is not None:
            check(output.param, output.alone)
        rules = Rules(self._mark)
        start = self._start(rules, request, output)
        if not start:
            return ""
        if self.reasoning is not None:
            start = f"{self.reasoning.before(rules, opened=opened)} ({start})"
        if output is None or "@output" not in start:
            return rules.start(start)
        return output.alone if start == "@output" else output.within(rules, start)

    def parser(self, request: ToolRequest | None, *, opened: bool) -> AssistantParser:
        """A parser for one choice."""
        splitter = None if self.reasoning is None else ReasoningSplitter(self.reasoning, opened=opened)
        calls: CallParser | None = None
        if request is not None and self.tools is not None and _may_call(request):
            calls = self.tools.parser(request.callable_tools)
        return AssistantParser(splitter, calls)

    def _start(self, rules: Rules, request: ToolRequest | None, output: OutputGrammar | None) -> str:
        free = "@output" if output is not None else ""
        if request is None or self.tools is None or not _may_call(request):
            return free
        tools, parallel = request.callable_tools, request.parallel
        demanded = request.choice is ToolChoice.REQUIRED
        if not demanded and not free and parallel and not any(tool.strict for tool in tools):
            return ""
        for tool in tools:
            check(tool.param, schema_grammar(tool.parameters))
        if not demanded and not free:
            return self.tools.possible(rules, tools, parallel=parallel)
        calls = self.tools.demanded(rules, tools, parallel=parallel)
        return calls if demanded else f"{calls} | {free}"

    def _mark(self, text: str) -> str:
        token = self.tokens.get(text)
        return literal(text) if token is None else f"<[{token}]>"


def dialect_of(
    *,
    template: str,
    takes_tools: bool,
    tokens: Mapping[str, int],
    hidden: frozenset[str],
    tool_parser: str,
    reasoning_parser: str,
) -> Dialect:
    """The dialect of a template, or what the configuration says it is."""
    return Dialect(
        tools=tool_format(tool_parser, template),
        takes_tools=takes_tools,
        reasoning=reasoning_format(reasoning_parser, template),
        tokens=tokens,
        hidden=hidden,
    )


def _may_call(request: ToolRequest | None) -> bool:
    return request is not None and request.choice is not ToolChoice.NONE
