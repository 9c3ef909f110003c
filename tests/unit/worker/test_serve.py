"""What a worker says when it cannot start."""

import asyncio
import sys
from pathlib import Path

import pytest

from farfill.config.load import load_config
from farfill.core.errors import ConfigError
from farfill.worker import serve


async def test_missing_engine_names_the_extra_to_install(monkeypatch, cluster_file: Path):
    monkeypatch.delitem(sys.modules, "farfill.engine.torch.loader", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"engine.type: torch needs torch.*farfill\[torch\]"):
        await serve._load_engine(load_config(cluster_file), asyncio.Event())
