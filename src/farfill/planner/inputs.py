"""Reads planner files people write (YAML or JSON): every mistake with its line, its key and a fix, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

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
            problems += problems_of(error.errors(include_url=False), model)
    raise ConfigError("\n".join(dict.fromkeys(problem.render(path, parsed.lines) for problem in problems)))


def refuse(path: Path, lines: dict[KeyPath, int], key: KeyPath, what: str, fix: str) -> ConfigError:
    """To be raised: what is wrong with `key` of the file `path`."""
    return ConfigError(Problem(key, what, fix, line_of(key, lines)).render(path, lines))
