"""Writing grammars in llguidance's Lark: literals, markers that are single tokens, JSON schemas, and composing them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Mark = Callable[[str], str]
"""The terminal of a marker: its token's id where the tokenizer has one (plain text never matches such a token)."""

ANY_TEXT = "/(.|\\n)*/"

# White space a weak model could go on with forever is bounded; this is enough for deep indentation.
_JSON_OPTIONS = {"whitespace_pattern": "[ \\n\\r\\t]{0,32}"}


def literal(text: str) -> str:
    """The terminal of exactly this text."""
    return json.dumps(text)  # escapes are the same


def json_value(schema: Mapping[str, Any]) -> str:
    """The terminal of JSON that `schema` allows, keys in the schema's order."""
    options = {**_JSON_OPTIONS, **(schema.get("x-guidance") or {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


class Rules:
    """Rules under construction; names are unique."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark
        self._lines: list[str] = []

    def add(self, stem: str, body: str, options: str = "") -> str:
        """A new rule; its name."""
        name = f"{stem}_{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def any_of(self, stem: str, names: list[str]) -> str:
        """A rule that is one of others."""
        return self.add(stem, " | ".join(names))

    def before(self, marker: str) -> str:
        """A rule of any text up to and with `marker`, at its first appearance."""
        terminal = self.mark(marker)
        if terminal.startswith("<["):
            return self.add("before", f"{self.any_text()} {terminal}")
        return self.add("before", f"{ANY_TEXT} {terminal}", "[lazy]")

    def any_text(self) -> str:
        """A rule of any text, maybe none."""
        return self.add("text", ANY_TEXT)

    def start(self, body: str) -> str:
        """The finished grammar."""
        return "\n".join(["%llguidance {}", f"start: {body}", *self._lines, ""])
