"""Loads the cluster file. Every complaint names file, line, key and a fix; all of them come at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from farfill.config.checks import cross_problems, model_file_problems
from farfill.config.model import ClusterConfig
from farfill.config.models import config_for_worker
from farfill.config.problems import KeyPath, Problem, line_of, problems_of
from farfill.config.yaml_lines import parse_yaml
from farfill.core.errors import ConfigError

MAX_FILE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid cluster file. Relative paths in it start at `base_dir`; `lines` maps key paths to lines."""

    config: ClusterConfig
    path: Path
    base_dir: Path
    lines: Mapping[KeyPath, int] = field(default_factory=dict[KeyPath, int], repr=False)

    @property
    def model_dir(self) -> Path:
        """Where the model's files are."""
        return self.base_dir / self.config.model.path

    def for_worker(self, name: str) -> LoadedConfig:
        """The same with the worker's model as the only one."""
        return replace(self, config=config_for_worker(self.config, name))


def load_config(path: Path | str) -> LoadedConfig:
    """Read and validate `path`. Raises ConfigError with every problem found, one a line."""
    return load_text(_read(Path(path)), Path(path))


def load_text(text: str, path: Path) -> LoadedConfig:
    """The same of a text that stands, or would stand, at `path`."""
    parsed = parse_yaml(text)
    problems = list(parsed.problems)
    if not problems and not isinstance(parsed.value, dict):
        problems.append(Problem((), "not a cluster file", "see examples/two-sites.yaml", 1))
    config: ClusterConfig | None = None
    if isinstance(parsed.value, dict):
        try:
            # Validated as JSON: strict types, yet paths and enums may be written as text.
            config = ClusterConfig.model_validate_json(json.dumps(parsed.value))
        except ValidationError as error:
            told = {problem.path for problem in problems}
            found = problems_of(error.errors(include_url=False), ClusterConfig)
            problems += [problem for problem in found if problem.path not in told]
    if config is not None:
        problems += cross_problems(config)
    _refuse(path, problems, parsed.lines)
    assert config is not None
    return LoadedConfig(config, path, path.resolve().parent, parsed.lines)


def check_model_files(loaded: LoadedConfig) -> None:
    """Raises ConfigError unless the model's folder holds what a worker needs."""
    _refuse(loaded.path, model_file_problems(loaded.config, loaded.base_dir), loaded.lines)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is no cluster file")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; start from examples/two-sites.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; check the path and its permissions") from error


def _refuse(path: Path, problems: list[Problem], lines: Mapping[KeyPath, int]) -> None:
    if not problems:
        return
    ordered = sorted(problems, key=lambda p: p.line if p.line is not None else line_of(p.path, lines))
    raise ConfigError("\n".join(dict.fromkeys(problem.render(path, lines) for problem in ordered)))
