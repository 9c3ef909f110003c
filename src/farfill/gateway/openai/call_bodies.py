"""How models spell one tool call: scanners that take text in pieces and tell name and arguments as soon as they can.

Arguments come out as the JSON text the model wrote, piece by piece, so that joining the pieces of a stream gives
exactly what an answer that is not streamed says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_SPACE = " \t\r\n"
_NAME = re.compile(r"[\w.-]{1,128}")
_NUMBERED = re.compile(r"functions\.(?P<name>[\w.-]+):\d+")


class MalformedCallError(Exception):
    """The text is no call in this spelling."""


@dataclass(slots=True)
class Step:
    """What new text said. `rest` is the text after the end of the call; None while the call goes on."""

    name: str | None = None
    call_id: str | None = None
    arguments: str = ""
    rest: str | None = None


class CallBody(Protocol):
    """One call, from after its opening marker on."""

    def push(self, text: str) -> Step:
        """Take more text. Arguments never come before the name. Raises MalformedCallError."""
        ...


class JsonSpan:
    """Finds the end of one JSON value in text that comes in pieces and does not begin with white space."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._begun = False
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if self._closed():
                        return i + 1
            elif char == '"' and (self._depth or not self._begun):
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                if self._closed():
                    return i + 1
            elif not self._depth and char in '}],"' + _SPACE:  # after a number, true, false or null
                self.done = True
                return i
            self._begun = True
        return len(text)

    def _closed(self) -> bool:
        self.done = self._depth == 0
        return self.done


class JsonCall:
    """`{"name": …, "arguments": {…}}`, also with `parameters`, in any order, other keys ignored."""

    def __init__(self, known: Collection[str] | None = None) -> None:
        """`known`: names that make this a call; None takes any."""
        self._known = known
        self._buffer = ""
        self._at = self._open
        self._key = ""
        self._span = JsonSpan()
        self._value = ""
        self._name: str | None = None
        self._arguments = ""
        self._has_arguments = False
        self._step = Step()

    def push(self, text: str) -> Step:
        self._buffer += text
        self._step = Step()
        while self._step.rest is None and self._at():
            pass
        if self._name is not None and self._arguments:
            self._step.arguments, self._arguments = self._arguments, ""
        return self._step

    def _open(self) -> bool:
        return self._expect("{", self._read_key)

    def _expect(self, char: str, then: Any) -> bool:
        self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        if self._buffer[0] != char:
            raise MalformedCallError(f"{char} expected")
        self._buffer, self._at = self._buffer[1:], then
        return True

    def _read_key(self) -> bool:
        self._buffer = self._buffer.lstrip(_SPACE + ",")
        if self._buffer[:1] == "}":
            self._end(self._buffer[1:])
            return False
        if self._buffer and self._buffer[0] != '"':
            raise MalformedCallError("a key expected")
        span = JsonSpan()
        length = span.push(self._buffer)
        if not span.done:
            return False
        self._key, self._buffer = _loads(self._buffer[:length]), self._buffer[length:]
        self._at = self._read_colon
        return True

    def _read_colon(self) -> bool:
        self._span, self._value = JsonSpan(), ""
        return self._expect(":", self._read_value)

    def _read_value(self) -> bool:
        if not self._value:
            self._buffer = self._buffer.lstrip(_SPACE)
            if not self._buffer:
                return False
        length = self._span.push(self._buffer)
        piece, self._buffer = self._buffer[:length], self._buffer[length:]
        first = not self._value
        if first and not piece:
            raise MalformedCallError("a value expected")
        self._value += piece
        self._take(piece)
        if not self._span.done:
            return False
        self._at = self._read_key
        return True

    def _take(self, piece: str) -> None:
        if self._key == "name" and self._span.done:
            name = _loads(self._value)
            if not isinstance(name, str) or not name or (self._known is not None and name not in self._known):
                raise MalformedCallError("no name of a tool")
            self._name = self._step.name = name
        elif self._key in ("arguments", "parameters"):
            self._has_arguments = True
            if self._value[0] == "{":
                self._arguments += piece
            elif self._span.done:
                self._arguments += _as_object(self._value)

    def _end(self, rest: str) -> None:
        if self._name is None:
            raise MalformedCallError("no name")
        if not self._has_arguments:
            self._arguments = "{}"
        self._step.rest = rest


class NamedCall:
    """A name, a separator and a JSON object: `get_weather[ARGS]{…}`."""

    def __init__(self, separator: str, *, prefix: str = "") -> None:
        """`separator` may be empty: the object's brace ends the name. `prefix` before the name is dropped."""
        self._separator = separator
        self._prefix = prefix
        self._buffer = ""
        self._named = False
        self._begun = False
        self._span = JsonSpan()

    def push(self, text: str) -> Step:
        self._buffer += text
        step = Step()
        if not self._named and not self._read_name(step):
            return step
        if not self._begun:
            self._buffer = self._buffer.lstrip(_SPACE)
            if not self._buffer:
                return step
            if self._buffer[0] != "{":
                raise MalformedCallError("an object expected")
            self._begun = True
        length = self._span.push(self._buffer)
        step.arguments, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._span.done:
            step.rest = self._buffer
        return step

    def _read_name(self, step: Step) -> bool:
        name, found, rest = self._buffer.partition(self._separator or "{")
        if not found:
            if len(self._buffer) > 400:
                raise MalformedCallError("no name")
            return False
        self._buffer = rest if self._separator else found + rest
        name = name.removeprefix(self._prefix).removesuffix("[ARGS]").partition("[CALL_ID]")[0].strip()
        numbered = _NUMBERED.fullmatch(name)
        if numbered:
            name, step.call_id = numbered["name"], name
        if not _NAME.fullmatch(name):
            raise MalformedCallError("no name")
        self._named, step.name = True, name
        return True


class TaggedCall:
    """`<function=NAME><parameter=KEY>value</parameter></function>`: values are text, typed by the tool's schema."""

    _FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>\s*")
    _PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*", re.DOTALL)
    _END = re.compile(r"\s*</function>")

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: the JSON schema of each tool's arguments."""
        self._schemas = schemas
        self._buffer = ""
        self._name = ""
        self._count = 0

    def push(self, text: str) -> Step:
        self._buffer += text
        step = Step()
        if not self._name:
            found = self._FUNCTION.match(self._buffer)
            if found is None:
                opening = self._buffer.lstrip()
                if not "<function=".startswith(opening[:10]) or len(opening) > 200:
                    raise MalformedCallError("no function")
                return step
            self._name = step.name = found["name"].strip()
            self._buffer = self._buffer[found.end() :]
        while found := self._PARAMETER.match(self._buffer):
            step.arguments += ", " if self._count else "{"
            step.arguments += f"{json.dumps(found['key'])}: {self._value(found['key'], found['value'])}"
            self._count += 1
            self._buffer = self._buffer[found.end() :]
        if found := self._END.match(self._buffer):
            step.arguments += "}" if self._count else "{}"
            step.rest = self._buffer[found.end() :]
        return step

    def _value(self, key: str, text: str) -> str:
        properties = self._schemas.get(self._name, {}).get("properties") or {}
        schema = properties.get(key)
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return json.dumps(text, ensure_ascii=False)
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(str(error)) from error


def _as_object(value: str) -> str:
    """Arguments that are no object: none at all, or an object in a string."""
    loaded = _loads(value)
    if loaded is None:
        return "{}"
    if isinstance(loaded, str) and isinstance(_loads(loaded), dict):
        return loaded
    raise MalformedCallError("arguments are no object")
