"""Devices, CPUs and ways to compute attention that a configuration may ask for."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError
from farfill.engine.torch import load_engine
from farfill.engine.torch.host import pin_thread, usable_cpus
from farfill.engine.torch.loader import LoadOptions, load_model

PREFILL = PrefillConfig(chunked_prefill_tokens=16)
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no thread affinity on this system")


def model(path: Path) -> ModelConfig:
    return ModelConfig.model_validate({"name": "tiny", "path": path, "dtype": "float32"})


@needs_affinity
def test_lists_of_cpus_are_numbers_and_ranges() -> None:
    have = sorted(os.sched_getaffinity(0))
    assert usable_cpus(None) == frozenset()
    assert usable_cpus(",".join(map(str, have))) == set(have)
    assert usable_cpus(f"{have[0]}-{have[0]}") == {have[0]}


@needs_affinity
@pytest.mark.parametrize("listed", ["9999", "5-3"])
def test_cpus_that_are_not_there_are_named(listed: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.cpus: (9999|an empty range in 5-3) is not among the CPUs"):
        usable_cpus(listed)


@needs_affinity
def test_only_the_thread_that_computes_is_pinned(tiny_models: Any, harness: Any) -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    path = tiny_models.path("llama")
    engine = load_engine(model(path), EngineConfig(threads=1, cpus=str(cpu)), PREFILL, Path())
    seen: dict[str, set[int]] = {}
    engine.start()
    try:
        assert len(harness.generate(engine, harness.work(harness.prompt(20))).tokens()) == 12
        for thread in threading.enumerate():
            if thread.native_id is not None:
                seen[thread.name] = os.sched_getaffinity(thread.native_id)
    finally:
        engine.close()
    assert seen["farfill-engine"] == {cpu}
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_nothing_is_pinned_unless_asked_for() -> None:
    before = os.sched_getaffinity(0)
    pin_thread(frozenset())
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_a_configuration_error(tiny_models: Any) -> None:
    path = tiny_models.path("llama")
    with pytest.raises(ConfigError, match=r"engine\.device: cuda, but torch finds no such device"):
        load_engine(model(path), EngineConfig(device="cuda"), PREFILL, Path())


def test_attention_by_formula_gives_what_sdpa_does(tiny_models: Any, harness: Any) -> None:
    path = tiny_models.path("gemma3")
    executors = [
        load_model(path, model(path), 16, LoadOptions(attention=attention)).executor
        for attention in ("auto", "sdpa", "eager")
    ]
    tokens = harness.prompt(50)
    outputs = []
    for executor in executors:
        kv = executor.allocate(60)
        for start in range(0, 48, 16):
            executor.prefill(kv, tokens[start : start + 16])
        outputs.append(executor.decode([(kv, 65)])[0])
    assert (outputs[0] == outputs[1]).all()
    assert outputs[2] == pytest.approx(outputs[0], abs=1e-3)


def test_sdpa_is_refused_for_a_model_that_needs_its_own_formula(tmp_path: Path) -> None:
    from support.architectures import save_model

    save_model("gpt_oss", tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.attention: GptOssForCausalLM cannot use sdpa"):
        load_model(tmp_path, model(tmp_path), 16, LoadOptions(attention="sdpa"))
