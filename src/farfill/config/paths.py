"""Where Farfill keeps files of its own (XDG), and the environment that libraries and child processes get."""

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


def default_environment(values: Mapping[str, str]) -> None:
    """Set what this process's environment does not say yet, for libraries that read it when they are loaded."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def hugging_face_hub() -> Path:
    """Where Hugging Face libraries keep what they fetched, by their own environment variables."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
