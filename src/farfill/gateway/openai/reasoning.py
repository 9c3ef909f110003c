"""Reasoning apart from the answer, for models that think aloud between two markers before they answer."""

from __future__ import annotations

from dataclasses import dataclass

from farfill.gateway.openai.lark import Rules


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning. A template may already write the first one into the prompt."""

    name: str
    begin: str
    end: str

    def opened(self, prompt_end: str) -> bool:
        """Whether the prompt ends inside the reasoning, given its last few tokens as text."""
        return prompt_end.rstrip().endswith(self.begin)

    def before(self, rules: Rules, *, opened: bool) -> str:
        """A rule of the reasoning that comes, or may come, before what a grammar wants."""
        thought = f"{rules.before(self.end)} /[ \\n]{{0,8}}/"
        if opened:
            return rules.add("thought", thought)
        return rules.add("thought", f"({rules.mark(self.begin)} {thought})?")


FORMATS = (ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("mistral", "[THINK]", "[/THINK]"))


def reasoning_format(choice: str, template: str) -> ReasoningFormat | None:
    """The format named by `model.reasoning_parser`; with auto, the one whose markers the template has."""
    if choice == "none":
        return None
    if choice == "auto":
        return next((known for known in FORMATS if known.begin in template and known.end in template), None)
    return next(known for known in FORMATS if known.name == choice)


class ReasoningSplitter:
    """Cuts one choice's text into reasoning and the rest. Line breaks next to the markers belong to neither."""

    def __init__(self, markers: ReasoningFormat, *, opened: bool) -> None:
        self._begin, self._end = markers.begin, markers.end
        self._thinking = opened
        self._undecided = not opened
        self._trim = opened  # line breaks at the beginning are dropped
        self._buffer = ""

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, other text) that is certain now."""
        self._buffer += text
        if self._undecided:
            stripped = self._buffer.lstrip()
            if stripped.startswith(self._begin):
                self._buffer = stripped[len(self._begin) :]
                self._thinking = self._trim = True
            elif self._begin.startswith(stripped):
                return "", ""
            self._undecided = False
        reasoning = self._reasoning() if self._thinking else ""
        if self._thinking:
            return reasoning, ""
        if self._trim:
            self._buffer = self._buffer.lstrip("\n")
            self._trim = not self._buffer
        other, self._buffer = self._buffer, ""
        return reasoning, other

    def finish(self) -> tuple[str, str]:
        """What was held back, now that nothing follows."""
        held, self._buffer = self._buffer, ""
        return (held.rstrip("\n"), "") if self._thinking else ("", held)

    def _reasoning(self) -> str:
        if self._trim:
            self._buffer = self._buffer.lstrip("\n")
            self._trim = not self._buffer
        at = self._buffer.find(self._end)
        if at >= 0:
            found, self._buffer = self._buffer[:at].rstrip("\n"), self._buffer[at + len(self._end) :]
            self._thinking, self._trim = False, True
            return found
        kept = len(self._buffer)
        for start in range(max(0, kept - len(self._end) + 1), kept):
            if self._end.startswith(self._buffer[start:]):
                kept = start
                break
        kept = len(self._buffer[:kept].rstrip("\n"))
        found, self._buffer = self._buffer[:kept], self._buffer[kept:]
        return found
