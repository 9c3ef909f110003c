"""A rank that dies or stops: the engine ends, in time, and says so."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError, EngineError, ModelUnsupportedError
from farfill.engine.torch import load_engine
from farfill.engine.torch.ranks.engine import load_model
from farfill.engine.torch.ranks.group import Lost
from farfill.engine.torch.ranks.processes import Ranks

CHUNK = 16
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _no_check_is_remembered(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def model_config(path: Path) -> ModelConfig:
    return ModelConfig.model_validate({"name": "tiny", "path": path, "dtype": "float32"})


def test_a_rank_that_stops_answering_ends_the_engine_in_time(tiny_models: Any) -> None:
    config = model_config(tiny_models.path("qwen3_moe"))
    ranks = Ranks(2, DEADLINE_S, threads=1)
    try:
        executor = load_model(config.path, config, CHUNK, ranks=ranks).executor
        kv = executor.allocate(20)
        (rank,) = psutil.Process(ranks.pid).children()
        rank.send_signal(signal.SIGSTOP)
        ranks.timeout_s = 0.5
        with pytest.raises(Lost, match="rank 1 did not answer: no answer in time"):
            ranks.wait()
        with pytest.raises(Lost):
            executor.prefill(kv, [1, 2, 3])
        psutil.wait_procs([rank], DEADLINE_S)
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    finally:
        ranks.close()


def test_a_rank_that_dies_fails_the_engine_and_its_requests(tiny_models: Any, harness: Any) -> None:
    config = model_config(tiny_models.path("qwen3_moe"))
    prefill = PrefillConfig(chunked_prefill_tokens=CHUNK)
    sizes = {"threads": 1, "kv_cache_mb": 64, "prefix_cache_mb": 16}
    work = harness.work(harness.prompt(60), max_tokens=24)
    alone = load_engine(config, EngineConfig.model_validate(sizes), prefill, config.path.parent)
    alone.start()
    expected = harness.generate(alone, work).tokens()
    alone.close()
    before = set(psutil.Process().children())
    engine = load_engine(config, EngineConfig.model_validate({**sizes, "ranks": 2}), prefill, config.path.parent)
    try:
        engine.start()
        assert harness.generate(engine, work).tokens() == expected
        loads = engine.load().ranks
        assert loads is not None
        assert len(loads.step_s) == 2
        engine.check_integrity()
        (launcher,) = set(psutil.Process().children()) - before
        running = harness.start(engine, harness.work(harness.prompt(60, 5), max_tokens=190))
        assert running.first.wait(DEADLINE_S)
        launcher.children()[0].kill()
        assert running.ended.wait(DEADLINE_S)
        assert isinstance(running.error, EngineError)
        assert running.error.reason == "engine_dead"
        with pytest.raises(EngineError, match="the engine's ranks are lost"):
            engine.load()
    finally:
        engine.close()
    assert not launcher.is_running()


def test_ranks_need_a_cpu(tiny_models: Any) -> None:
    config = model_config(tiny_models.path("llama"))
    with pytest.raises(ConfigError, match=r"engine\.ranks: more than 1 needs engine\.device: cpu"):
        load_engine(config, EngineConfig(ranks=2, device="cuda"), PrefillConfig(), config.path.parent)


def test_a_model_that_cannot_be_cut_is_refused_before_ranks_start(tiny_models: Any) -> None:
    config = model_config(tiny_models.path("falcon_h1"))
    with pytest.raises(ModelUnsupportedError, match="model_type falcon_h1 is not known"):
        load_engine(config, EngineConfig(ranks=2, threads=1), PrefillConfig(), config.path.parent)
