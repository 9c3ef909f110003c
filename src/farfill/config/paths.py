"""Where Farfill keeps files of its own (XDG), and the environment its child processes get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/farfill`, or `~/.cache/farfill`. A relative XDG path is ignored, as the standard asks."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "farfill"


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra` on top."""
    return {**os.environ, **extra}
