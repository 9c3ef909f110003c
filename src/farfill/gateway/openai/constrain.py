"""Constraints a client puts on the output, as one grammar: OpenAI's `response_format` and vLLM's fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from farfill.core.errors import InvalidRequestError
from farfill.engine.grammar import check_grammar
from farfill.gateway.openai.lark import Rules, json_value, literal
from farfill.gateway.openai.requests import ResponseFormat, SamplingFields

MAX_CHOICES = 4096
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_SCHEMA_DEPTH = 100
GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names; `structured_outputs` has the newer ones."""

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """What the whole output must be; `param` is the field that asked for it. `entry` is a grammar of llguidance."""

    param: str
    entry: Mapping[str, Any]

    @property
    def alone(self) -> str:
        """The grammar as the engine takes it."""
        return json.dumps({"grammars": [self.entry]})

    def within(self, rules: Rules, start: str) -> str:
        """A grammar from `start`, in which `@output` stands for this one."""
        return json.dumps({"grammars": [{"lark_grammar": rules.start(start)}, {**self.entry, "name": "output"}]})


def check(param: str, grammar: str) -> None:
    """Raises InvalidRequestError naming `param` when the grammar cannot be used. Blocks up to a second."""
    try:
        check_grammar(grammar)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param} cannot be used: {error}", param=param, reason=error.reason) from error


def output_grammar(body: SamplingFields) -> OutputGrammar | None:
    """The one constraint of a request, not yet checked. May take a tenth of a second: run it in a thread.

    Raises InvalidRequestError when there are two, or its shape is wrong.
    """
    found = [grammar for grammar in (_response_format(body.response_format), *_of_vllm(body)) if grammar is not None]
    if len(found) > 1:
        raise InvalidRequestError(
            f"{found[0].param} and {found[1].param} both constrain the output; give one", param=found[1].param
        )
    return found[0] if found else None


def check_schema_depth(param: str, schema: Any) -> None:
    """Raises InvalidRequestError for a schema nested so deeply that writing it out would fail."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequestError(f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=param)
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]


def schema_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that `schema` allows."""
    return f"start: {json_value(schema)}"


def _response_format(asked: ResponseFormat | None) -> OutputGrammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _json("response_format", _ANY_OBJECT)
    if asked.type != "json_schema":
        raise InvalidRequestError(
            f"response_format.type {asked.type!r} is not text, json_object or json_schema",
            param="response_format.type",
            reason="unsupported",
        )
    param = "response_format.json_schema.schema"
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise InvalidRequestError(f"{param} is missing", param=param)
    return _json(param, asked.json_schema.schema)


def _of_vllm(body: SamplingFields) -> list[OutputGrammar | None]:
    outputs = body.structured_outputs
    given: dict[str, Any] = {name: getattr(body, name) for name in GUIDED_FIELDS}
    if outputs is not None:
        given |= {f"structured_outputs.{name}": getattr(outputs, name) for name in outputs.__struct_fields__}
    return [
        _of_kind(param, param.rpartition(".")[2].removeprefix("guided_"), value)
        for param, value in given.items()
        if value is not None and value is not False
    ]


def _of_kind(param: str, kind: str, value: Any) -> OutputGrammar:
    if kind == "json_object":
        return _json(param, _ANY_OBJECT)
    if kind == "json":
        return _json(param, _schema(param, value))
    if isinstance(value, str) and len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"{param} has {len(value)} characters, at most {MAX_GRAMMAR_CHARS}", param=param)
    if kind == "regex":
        return OutputGrammar(param, json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0])
    if kind == "choice":
        if not 0 < len(value) <= MAX_CHOICES or not all(value):
            raise InvalidRequestError(f"{param} needs 1 to {MAX_CHOICES} texts that are not empty", param=param)
        # One terminal: alternatives of a rule are rows of the parser, of which it takes 2,000.
        choices = " | ".join(map(literal, value))
        return OutputGrammar(param, {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"})
    try:
        return OutputGrammar(param, {"lark_grammar": any_to_lark(value)})
    except Exception as error:  # the converter raises whatever its parser trips over
        raise InvalidRequestError(
            f"{param} is neither GBNF nor Lark: {error}", param=param, reason="grammar"
        ) from error


def _json(param: str, schema: Mapping[str, Any]) -> OutputGrammar:
    check_schema_depth(param, schema)
    return OutputGrammar(param, {"lark_grammar": schema_grammar(schema)})


def _schema(param: str, value: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param} is not a JSON schema: {error}", param=param) from error
