"""Every setting and command is documented."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from farfill.cli.main import app
from farfill.config.model import ClusterConfig
from farfill.config.problems import _without_none

DOCS = Path(__file__).parents[3] / "docs"


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = _without_none(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from settings(kind, f"{prefix}{name}.")
        elif typing.get_origin(kind) is dict:
            yield from settings(typing.get_args(kind)[1], f"{prefix}{name}.NAME.")
        else:
            assert field.description, f"{prefix}{name} has no description"
            yield f"{prefix}{name}"


def commands() -> Iterator[tuple[str, list[str]]]:
    root = typer.main.get_command(app)
    for name, command in root.commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        for full, leaf in [(f"{name} {sub}", c) for sub, c in getattr(command, "commands", {}).items()] or [
            (name, command)
        ]:
            yield f"farfill {full}", [p.opts[0] for p in leaf.params if p.opts[0].startswith("--")]


@pytest.mark.parametrize("setting", list(settings(ClusterConfig)))
def test_setting_is_documented(setting: str):
    assert f"| `{setting}` |" in (DOCS / "configuration.md").read_text()


def test_no_documented_setting_is_gone():
    page = (DOCS / "configuration.md").read_text()
    told = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert told == set(settings(ClusterConfig))


@pytest.mark.parametrize(("command", "options"), list(commands()))
def test_command_is_documented(command: str, options: list[str]):
    page = (DOCS / "cli.md").read_text()
    assert f"`{command}" in page
    if command == "farfill up":
        for option in options:
            assert f"`{option}" in page, f"{option} of {command} is missing in docs/cli.md"
