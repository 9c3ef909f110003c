"""Chat templates: Hugging Face's jinja dialect in a sandbox.

Same environment as transformers documents for chat templates: immutable sandbox, `trim_blocks`,
`lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escaping, and the
`{% generation %}` block, which only marks text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from farfill.core.errors import ConfigError, InvalidRequestError

ChatMessage = Mapping[str, Any]

_PROBE = "some text"
_OWN_VARIABLES = frozenset({"messages", "add_generation_prompt", "tools", "documents"})


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError when the template does not compile."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        # Templates of some vision models drop a content that is no list of parts.
        self._wants_parts = self._shows([{"type": "text", "text": _PROBE}]) and not self._shows(_PROBE)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; `variables` are what the client sets of the template's own switches.

        Raises InvalidRequestError when the template refuses the messages or has no such switch.
        """
        self._check_variables(variables or {})
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": [self._as_wanted(m) for m in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "documents": None,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages", reason="chat_template"
            ) from error

    def _shows(self, content: Any) -> bool:
        """Whether a user's text comes out of the template when it goes in as `content`."""
        messages = [{"role": "user", "content": content}]
        try:
            text = self._template.render(**self._special_tokens, messages=messages, add_generation_prompt=True)
        except Exception:
            # A template may fail in any way on what it was not made for, and on what this one message lacks.
            return False
        return _PROBE in text

    def _as_wanted(self, message: ChatMessage) -> dict[str, Any]:
        content = message.get("content")
        if self._wants_parts and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}] if content else []}
        return dict(message)

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        switches = self.variables - _OWN_VARIABLES - set(self._special_tokens)
        for name in variables:
            if name not in switches:
                known = ", ".join(sorted(switches)) or "none"
                raise InvalidRequestError(
                    f"this model's chat template has no switch {name!r}; it has: {known}",
                    param=f"chat_template_kwargs.{name}",
                )


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: marks what the assistant said; renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 -- jinja2 wants a plain set here

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
