"""`farfill worker`: which worker, and with which engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from farfill.cli.worker import EngineKind, pick, with_engine
from farfill.config.load import load_config
from farfill.core.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "two-sites.yaml"


def test_the_command_line_goes_before_the_file() -> None:
    loaded = load_config(EXAMPLE)
    assert with_engine(loaded, None, None) is loaded
    changed = with_engine(loaded, EngineKind.VLLM, "http://127.0.0.1:8000").config
    assert (changed.engine.type, changed.engine.attach) == ("vllm", "http://127.0.0.1:8000")
    assert changed.engine.kv_cache_mb == loaded.config.engine.kv_cache_mb
    assert changed.workers == loaded.config.workers


@pytest.mark.parametrize(
    ("engine", "attach", "problem"),
    [
        (EngineKind.VLLM, "127.0.0.1:8000", "is no http://HOST:PORT"),
        (EngineKind.VLLM, "http://127.0.0.1:8000/v1", "is no http://HOST:PORT"),
        (EngineKind.TORCH, "http://127.0.0.1:8000", "--attach needs --engine vllm"),
        (None, "unix:/run/vllm.sock", "--attach needs --engine vllm"),
    ],
)
def test_what_does_not_fit_is_refused(engine: EngineKind | None, attach: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        with_engine(load_config(EXAMPLE), engine, attach)


def test_a_worker_is_named_unless_there_is_only_one() -> None:
    loaded = load_config(EXAMPLE)
    names = list(loaded.config.workers)
    assert pick(loaded, names[-1]) == names[-1]
    with pytest.raises(ConfigError, match="say --name with one of"):
        pick(loaded, None)
    with pytest.raises(ConfigError, match="no worker is named nobody"):
        pick(loaded, "nobody")
