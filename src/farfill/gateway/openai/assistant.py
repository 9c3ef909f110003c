"""One choice's text as the parts of an assistant's message: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Callable

from farfill.gateway.openai.call_parser import CallParser, Parsed
from farfill.gateway.openai.reasoning import ReasoningSplitter


class AssistantParser:
    """Streamed or whole, the parts are the same. Without splitter and calls all text is content."""

    def __init__(self, reasoning: ReasoningSplitter | None = None, calls: CallParser | None = None) -> None:
        self._reasoning = reasoning
        self._calls = calls

    @property
    def separates_reasoning(self) -> bool:
        """Whether messages have a place for reasoning."""
        return self._reasoning is not None

    @property
    def plain(self) -> bool:
        """Whether all text is content, as it comes."""
        return self._reasoning is None and self._calls is None

    def push(self, text: str, finish_reason: str | None) -> Parsed:
        """Take new text; with a finish reason, also what was held back until now."""
        reasoning, other = ("", text) if self._reasoning is None else self._reasoning.push(text)
        if finish_reason is not None and self._reasoning is not None:
            last_reasoning, last = self._reasoning.finish()
            reasoning, other = reasoning + last_reasoning, other + last
        if self._calls is None:
            return Parsed(content=other, reasoning=reasoning)
        parsed = self._calls.push(other)
        if finish_reason is not None:
            last_parsed = self._calls.finish()
            parsed.content += last_parsed.content
            parsed.calls += last_parsed.calls
        parsed.reasoning = reasoning
        return parsed

    def finish_reason(self, finish_reason: str | None) -> str | None:
        """What the client hears: a stop after calls is there for the calls."""
        called = self._calls is not None and self._calls.calls > 0
        return "tool_calls" if called and finish_reason == "stop" else finish_reason


NewParser = Callable[[], AssistantParser]
"""Makes the parser of one more choice."""
