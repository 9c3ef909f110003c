"""What is wrong with a cluster file, said so that it can be fixed: place, complaint, suggestion."""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from farfill.config.section import Address, Name, SecretRef

KeyPath = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path as text",
    "model_type": "a group of keys",
    "model_attributes_type": "a group of keys",
    "dict_type": "a group of keys",
    "list_type": "a list",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_RANGE_ERRORS = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}
_DECIMAL = re.compile(r"[-+]?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """One complaint. `line` is 1-based; None: the line of `path`, or of its nearest parent."""

    path: KeyPath
    what: str
    fix: str
    line: int | None = None

    def render(self, file: Path, lines: Mapping[KeyPath, int]) -> str:
        """`file:line: key.path: what; fix`."""
        where = f"{file}:{self.line if self.line is not None else line_of(self.path, lines)}"
        key = ".".join(str(part) for part in self.path)
        return f"{where}: {key}: {self.what}; {self.fix}" if key else f"{where}: {self.what}; {self.fix}"


def line_of(path: KeyPath, lines: Mapping[KeyPath, int]) -> int:
    """The line of `path`; of the nearest parent when the key itself is not in the file."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


def problems_of(errors: Iterable[ErrorDetails], model: type[BaseModel]) -> list[Problem]:
    """Pydantic's complaints about `model`, in this file's words.

    It has one for each kind of value a key may have; here that is one complaint.
    """
    found: dict[Problem, None] = {}
    for error in errors:
        field = _field_at(error["loc"][:-1], model)
        choices = _choices(field) if field and not _field_at(error["loc"], model) else ""
        if choices:
            found[Problem(error["loc"][:-1], f"{error['input']!r} does not fit", f"give {choices}")] = None
        else:
            found[_problem_of(error, model)] = None
    return list(found)


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _problem_of(error: ErrorDetails, model: type[BaseModel]) -> Problem:  # noqa: PLR0911 - one per kind of error
    kind, path, found = error["type"], error["loc"], error["input"]
    if path and path[-1] == "[key]":
        return Problem(path[:-1], f"{found!r} is not a name", _pattern_hint(Name))
    if kind == "extra_forbidden":
        return _unknown_key(path, model)
    if kind == "value_error":
        return (
            Problem(path, str(error["ctx"]["error"]), "see docs/configuration.md") if "ctx" in error else _plain(error)
        )
    field = _field_at(path, model)
    if kind == "missing" and field:
        return Problem(path, "required, but missing", f"add it, such as {path[-1]}: {_example(field)}")
    if kind in ("too_short", "string_too_short") and field:
        return Problem(path, "is empty", f"fill it in, such as {path[-1]}: {_example(field)}")
    if kind in ("literal_error", "enum"):
        return _not_one_of(path, found, error)
    if kind in _RANGE_ERRORS:
        return Problem(path, f"{found} is out of range", f"give {_range_text(field) if field else _bound_text(error)}")
    if kind == "string_pattern_mismatch":
        return _bad_pattern(path, str(found), error, field)
    if kind in _EXPECTED:
        return Problem(path, f"expected {_EXPECTED[kind]}, found {_describe(found)}", _type_fix(kind, found))
    return _plain(error)


def _plain(error: ErrorDetails) -> Problem:
    return Problem(error["loc"], error["msg"], "see docs/configuration.md")


def _unknown_key(path: KeyPath, model: type[BaseModel]) -> Problem:
    group = _model_at(path[:-1], model)
    known = list(group.model_fields) if group else []
    near = closest(str(path[-1]), known)
    return Problem(path, "unknown key", f"did you mean {near}?" if near else f"known keys here: {', '.join(known)}")


def _not_one_of(path: KeyPath, found: Any, error: ErrorDetails) -> Problem:
    allowed = error.get("ctx", {}).get("expected", "").replace("'", "")
    near = closest(str(found), allowed.replace(" or ", ", ").split(", "))
    fix = f"did you mean {near}?" if near else "give one of these"
    return Problem(path, f"{found!r} is not one of {allowed}", fix)


def _bad_pattern(path: KeyPath, found: str, error: ErrorDetails, field: FieldInfo | None) -> Problem:
    pattern = error.get("ctx", {}).get("pattern", "")
    if pattern == _pattern_of(SecretRef):
        if found.startswith("vault:"):
            return Problem(path, "vault: references are not supported yet in this version", "use file:PATH or env:NAME")
        return Problem(path, "expected a reference to a secret, never its value", "write file:PATH or env:NAME")
    if pattern == _pattern_of(Address):
        return Problem(path, f"{found!r} is not an address", "write host:port, such as 10.0.0.5:7400 or [::1]:7400")
    if pattern == _pattern_of(Name):
        return Problem(path, f"{found!r} is not a name", _pattern_hint(Name))
    if field and field.examples:
        return Problem(path, f"{found!r} is not a {path[-1]}", f"give one of: {', '.join(field.examples)}")
    return _plain(error)


def _example(field: FieldInfo) -> str:
    """What may stand after the key: the field's own example, or a group of what is required in it."""
    if field.examples:
        return str(field.examples[0])
    group = field.annotation
    assert isinstance(group, type), "a required value that is no group has an example"
    assert issubclass(group, BaseModel)
    required = {name: inner for name, inner in group.model_fields.items() if inner.is_required()}
    return "{" + ", ".join(f"{name}: {_example(inner)}" for name, inner in required.items()) + "}"


def _pattern_of(annotated: Any) -> str:
    return typing.get_args(annotated)[1].metadata[0].pattern


def _pattern_hint(annotated: Any) -> str:
    assert annotated is Name
    return "use up to 63 lower-case letters, digits and dashes, starting and ending with a letter or digit"


def _range_text(field: FieldInfo) -> str:
    """Such as "at least 1 and at most 256"."""
    bounds = [
        f"{word} {getattr(constraint, name)}"
        for constraint in field.metadata
        for name, word in _BOUNDS.items()
        if hasattr(constraint, name)
    ]
    return " and ".join(bounds)


def _bound_text(error: ErrorDetails) -> str:
    """The bound that was missed, where it is not known which member of a union the field is of."""
    bounds = error.get("ctx", {})
    return " and ".join(f"{word} {bounds[name]}" for name, word in _BOUNDS.items() if name in bounds)


def _choices(field: FieldInfo) -> str:
    """What a key of several kinds of value may be, in words; empty for others."""
    kinds = typing.get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else ()
    if not kinds and typing.get_origin(field.annotation) is typing.Union:
        kinds = typing.get_args(field.annotation)
    words: list[str] = []
    for kind in kinds:
        if typing.get_origin(kind) is typing.Literal:
            words += [str(value) for value in typing.get_args(kind)]
        elif typing.get_origin(kind) is typing.Annotated:
            inner, *extra = typing.get_args(kind)
            if not isinstance(inner, type):
                return ""
            ranges = [_range_text(info) for info in extra if isinstance(info, FieldInfo)]
            name = inner.__name__
            words.append(", ".join([_EXPECTED.get(f"{name}_type", name), *[text for text in ranges if text]]))
        else:
            return ""
    return ", or ".join(words)


def _describe(found: Any) -> str:
    if isinstance(found, str):
        return f"the text {found!r}"
    if found is None:
        return "nothing"
    if isinstance(found, dict):
        return "a group of keys"
    if isinstance(found, list):
        return "a list"
    return json.dumps(found)


def _type_fix(kind: str, found: Any) -> str:  # noqa: PLR0911 - one per kind of mistake
    if isinstance(found, str) and kind in ("int_type", "float_type"):
        if _DECIMAL.fullmatch(found):
            return "remove the quotes"
        return "give a number in plain digits" if any(char.isdigit() for char in found) else "give a number"
    if kind == "string_type" and isinstance(found, bool | int | float):
        return "put it in quotes"
    if kind == "bool_type":
        return "write true or false, without quotes"
    if found is None:
        return "give a value or remove the key"
    if kind == "list_type":
        return f"write [{json.dumps(found)}]" if isinstance(found, str | int | float) else "give a list"
    return f"give {_EXPECTED[kind]}"


def _model_at(path: KeyPath, model: type[BaseModel]) -> type[BaseModel] | None:
    """The model class of the group at `path`, descending through named entries such as workers."""
    current: Any = model
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(part))
            current = _without_none(field.annotation) if field else None
        elif typing.get_origin(current) in (dict, list):
            current = typing.get_args(current)[-1]
        else:
            return None
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _field_at(path: KeyPath, model: type[BaseModel]) -> FieldInfo | None:
    group = _model_at(path[:-1], model) if path else None
    return group.model_fields.get(str(path[-1])) if group else None


def _without_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        rest = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return cast("Any", rest[0]) if len(rest) == 1 else annotation
    return annotation
