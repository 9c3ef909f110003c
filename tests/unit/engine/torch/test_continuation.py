"""Prompts continued from checkpoints and prefix hits, and interrupted chunks, on real models of every kind of cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farfill.config.model import ModelConfig
from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from farfill.engine.torch.loader import LoadOptions, load_model
from support.architectures import save_model

CHUNK = 16
LENGTH = 5 * CHUNK + 6


@pytest.fixture(
    scope="module", params=["gemma3", "qwen3_next", "falcon_h1", "nemotron_h", "lfm2", "mamba2", "deepseek_v3"]
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path)
    model = ModelConfig.model_validate({"name": request.param, "path": path, "dtype": "float32"})
    return load_model(Path(path), model, CHUNK, LoadOptions(checkpoint_every_chunks=2))


@pytest.fixture
def make(loaded: Any) -> Iterator[Any]:
    engines: list[LocalEngine] = []

    def make(**limits: Any) -> LocalEngine:
        bounds = EngineLimits(**{"max_batch": 4, "max_queue": 16, "prefix_cache_bytes": 0, **limits})
        info = replace(loaded.info, kv_total_bytes=1 << 26)
        engines.append(LocalEngine(info, loaded.executor, loaded.vocabulary, bounds))
        engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
        engine.check_integrity()
        assert engine.load().kv_used_bytes == 0


def test_transfer_that_broke_is_continued_from_the_last_checkpoint(make: Any, harness: Any) -> None:
    far = make()
    work = harness.work(harness.prompt(LENGTH), max_tokens=8)
    exported = harness.prefill(far, work.prompt).pieces
    near = make()
    expected = harness.generate(near, work).tokens()
    layout = near.info.layout
    for chunks in range(1, 6):
        slot = near.reserve(work)
        harness.fill(slot, exported, chunks)
        there = range(sum(len(group) for group in slot.manifest.by_prefill_chunk[:chunks]))
        valid = slot.manifest.complete_prefix_tokens(there)
        assert valid == (chunks if layout.resumable else chunks // 2 * 2) * CHUNK
        resumed = harness.generate(near, work, slot, valid_tokens=valid)
        assert resumed.tokens() == expected, f"after {chunks} chunks"
        assert resumed.stats.computed_tokens == LENGTH - 1 - valid


def test_prefix_hit_continues_exactly(make: Any, harness: Any) -> None:
    plain = make()
    works = [harness.work(harness.prompt(LENGTH)[:n] + harness.prompt(30, seed=n), max_tokens=8) for n in (80, 50, 33)]
    expected = [harness.generate(plain, work).tokens() for work in works]
    engine = make(prefix_cache_bytes=1 << 24)
    warm = harness.generate(engine, harness.work(harness.prompt(LENGTH), max_tokens=2))
    assert warm.stats.cached_tokens == 0
    for work, tokens, cached in zip(works, expected, (80, 48, 32), strict=True):
        hit = harness.generate(engine, work)
        assert hit.stats.cached_tokens == cached
        assert hit.tokens() == tokens


def test_decode_steps_inside_a_chunk_change_neither(make: Any, harness: Any) -> None:
    plain = make()
    streams = [harness.work(harness.prompt(5 + 9 * i, seed=i), max_tokens=30) for i in range(2)]
    expected = [harness.generate(plain, work).tokens() for work in streams]
    exported = harness.prefill(plain, harness.prompt(LENGTH, seed=9)).pieces
    engine = make(step_token_budget=4)
    running = [harness.start(engine, work) for work in streams]
    for sink in running:
        assert sink.first.wait(60)
    assert harness.prefill(engine, harness.prompt(LENGTH, seed=9)).pieces == exported
    assert [sink.wait().tokens() for sink in running] == expected
