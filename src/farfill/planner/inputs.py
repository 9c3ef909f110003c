"""Reads planner files people write (YAML or JSON): every mistake with its line, its key and a fix, all at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from farfill.config.problems import KeyPath, Problem, line_of, problems_of
from farfill.config.yaml_lines import parse_yaml
from farfill.core.errors import ConfigError

MAX_FILE_BYTES = 16 * 1024 * 1024


class Section(BaseModel):
    """Unknown keys are refused; values are never coerced from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Model = TypeVar("Model", bound=BaseModel)


def read_input(path: Path, model: type[Model], what: str) -> tuple[Model, dict[KeyPath, int]]:
    """The file as `model`, and the line of each key. Raises ConfigError; `what` says what the file should be."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is no {what}")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    parsed = parse_yaml(text)
    problems = list(parsed.problems)
    if not problems and not isinstance(parsed.value, dict):
        problems.append(Problem((), f"not a {what}", "see docs/planning.md", 1))
    if isinstance(parsed.value, dict) and not problems:
        try:
            return model.model_validate_json(json.dumps(parsed.value)), parsed.lines
        except ValidationError as error:
            errors = error.errors(include_url=False)
            for found in errors:
                found["loc"] = _written(found["loc"], parsed.value)
            problems += [_at_home(problem) for problem in problems_of(errors, model)]
    raise ConfigError("\n".join(dict.fromkeys(problem.render(path, parsed.lines) for problem in problems)))


def _written(path: KeyPath, value: object) -> KeyPath:
    """`path` as it stands in the file: without the tags by which pydantic tells the members of a union apart."""
    kept: list[str | int] = []
    for i, part in enumerate(path):
        if isinstance(value, dict) and part in value:
            value = cast("dict[str | int, object]", value)[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(cast("list[object]", value)):
            value = cast("list[object]", value)[part]
        elif i < len(path) - 1:
            continue
        kept.append(part)
    return tuple(kept)


def _at_home(problem: Problem) -> Problem:
    return replace(problem, fix=problem.fix.replace("docs/configuration.md", "docs/planning.md"))


def refuse(path: Path, lines: dict[KeyPath, int], key: KeyPath, what: str, fix: str) -> ConfigError:
    """To be raised: what is wrong with `key` of the file `path`."""
    return ConfigError(Problem(key, what, fix, line_of(key, lines)).render(path, lines))
