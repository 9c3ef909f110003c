"""Tool calls out of running text: what stands outside the markers is content, what stands inside becomes calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from farfill.gateway.openai.call_bodies import CallBody, JsonCall, MalformedCallError, Step

_SPACE = " \t\r\n"
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallDelta:
    """News of call `index`: the first has id and name, all have a piece (maybe empty) of the arguments' JSON."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What new text turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list[CallDelta])


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Where calls stand. `begin` opens one, `end` closes it; `noise` are markers around groups of calls.

    `bare`: a text that begins with a brace is a call without marker. `listed`: after `begin` there may be a JSON list
    of calls. `separator`: between calls that share one marker. `short_ids`: nine letters and digits, as Mistral's
    template wants.
    """

    begin: str
    end: str = ""
    noise: tuple[str, ...] = ()
    separator: str = ""
    bare: bool = False
    listed: bool = False
    short_ids: bool = False


class _At(Enum):
    TEXT = auto()
    OPENED = auto()
    BODY = auto()
    AFTER = auto()


class CallParser:
    """One choice's output. Joined, all `content` and all calls are the same however the text was cut."""

    def __init__(self, syntax: CallSyntax, new_body: Callable[[], CallBody], names: Sequence[str]) -> None:
        """`names` decide whether JSON without a marker is a call."""
        self._syntax = syntax
        self._new_body = new_body
        self._names = frozenset(names)
        self._markers = [marker for marker in (syntax.begin, syntax.end, *syntax.noise) if marker]
        self._at = _At.TEXT
        self._buffer = ""
        self._raw = ""  # of the call being read, as long as it has no name
        self._body: CallBody | None = None
        self._named = False
        self._in_list = False
        self._blank = True  # nothing shown since the start or the last call
        self.calls = 0
        self._out = Parsed()

    def push(self, text: str) -> Parsed:
        """Take new text."""
        self._buffer += text
        self._out = Parsed()
        while self._advance():
            pass
        return self._out

    def finish(self) -> Parsed:
        """Nothing follows: what was held back. A call without a name yet is text."""
        self._out = Parsed()
        if self._at is _At.TEXT and not (self.calls and not self._buffer.strip()):
            self._show(self._buffer)
        elif self._at in (_At.OPENED, _At.BODY) and not self._named:
            self._show(self._raw + self._buffer)
        self._buffer = ""
        return self._out

    def _advance(self) -> bool:
        if self._at is _At.TEXT:
            return self._text()
        if self._at is _At.OPENED:
            return self._opened()
        if self._at is _At.BODY:
            return self._read_body()
        return self._after()

    def _text(self) -> bool:
        if self._blank and (self.calls or self._syntax.bare):
            stripped = self._buffer.lstrip(_SPACE)
            if not stripped:
                return False
            if self._syntax.bare and not self.calls and stripped[0] == "{":
                self._open("", stripped)
                return True
            if self.calls:
                self._buffer = stripped
        found = [(at, marker) for marker in self._markers if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._show(self._buffer[:at].rstrip(_SPACE))
            rest = self._buffer[at + len(marker) :]
            if marker == self._syntax.begin:
                self._open(marker, rest)
            else:
                self._buffer = rest
            return True
        keep = _held(self._buffer, self._markers)
        shown, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        self._show(shown)
        return False

    def _open(self, marker: str, rest: str) -> None:
        self._raw, self._buffer = marker, rest
        self._body, self._named = None, False
        self._at = _At.OPENED

    def _opened(self) -> bool:
        """A list of calls or a call?"""
        if not self._syntax.listed:
            self._next_body()
            return True
        stripped = self._buffer.lstrip(_SPACE)
        if not stripped:
            return False
        self._in_list = stripped[0] == "["
        if self._in_list:
            self._raw, self._buffer = self._raw + "[", stripped[1:]
        self._next_body()
        return True

    def _next_body(self) -> None:
        in_json = self._in_list or not self._raw.startswith(self._syntax.begin)
        self._body = JsonCall(None if self._in_list else self._names) if in_json else self._new_body()
        self._named = False
        self._at = _At.BODY

    def _read_body(self) -> bool:
        text, self._buffer = self._buffer, ""
        assert self._body is not None
        try:
            step = self._body.push(text)
        except MalformedCallError:
            raw, self._raw = self._raw + text, ""
            self._at, self._in_list = _At.TEXT, False
            if self._named:
                return False  # the client heard of a call; what it has stays, the rest of this piece is dropped
            self._show(raw)
            return False
        self._tell(step)
        if not self._named:
            self._raw += text
        if step.rest is None:
            return False
        self._raw, self._buffer, self._at = "", step.rest, _At.AFTER
        return True

    def _tell(self, step: Step) -> None:
        if step.name is not None:
            self._named, self._blank = True, True
            call_id = step.call_id or _new_id(short=self._syntax.short_ids)
            self._out.calls.append(CallDelta(self.calls, call_id, step.name, step.arguments))
            self.calls += 1
        elif step.arguments:
            self._out.calls.append(CallDelta(self.calls - 1, None, None, step.arguments))

    def _after(self) -> bool:
        """Behind a call: its end marker, or the next call of the same group."""
        self._buffer = self._buffer.lstrip(_SPACE)
        if not self._buffer:
            return False
        separator, end = (",", "]") if self._in_list else (self._syntax.separator, self._syntax.end)
        if separator and self._buffer.startswith(separator):
            self._buffer = self._buffer[len(separator) :]
            self._raw = "" if self._syntax.bare else self._syntax.begin
            self._next_body()
            return True
        if end and len(self._buffer) < len(end) and end.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(end)
        self._at, self._in_list = _At.TEXT, False
        return True

    def _show(self, text: str) -> None:
        if text:
            self._out.content += text
            self._blank = False


def _held(text: str, markers: Sequence[str]) -> int:
    """How much of the end of `text` may belong to a marker: its beginning, and the white space before it."""
    kept = len(text)
    for start in range(max(0, len(text) - max(map(len, markers)) + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            kept = start
            break
    return len(text) - len(text[:kept].rstrip(_SPACE))


def _new_id(*, short: bool) -> str:
    if short:
        return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
