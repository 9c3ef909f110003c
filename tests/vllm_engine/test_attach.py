"""A `vllm serve` that runs already, with one flag for Farfill: workers attach, detach and attach again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster, local_plan
from tests.vllm_engine.calls import GREEDY, Tokens, far, local, prompt_of, start_local, start_prefill, wait_until
from tests.vllm_engine.conftest import CHUNK_TOKENS, Fleet
from tests.vllm_engine.fronts import running_requests
from tests.vllm_engine.no_kv import assert_fails_alone, late_or_not, name_any_size
from tests.vllm_engine.serve import MODULE, Served, launch, serving

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError, EngineError, InvalidRequestError
from farfill.engine.protocol import GenerateWork
from farfill.engine.vllm.engine import VllmEngine
from farfill.engine.vllm.loader import load_engine
from farfill.verify.client import Generation
from farfill.verify.prompts import load_corpus

KEY = "only-workers-know"
LONG = replace(GREEDY, max_tokens=2_000)


class Two:
    """A producer found by the module's path, and a consumer found by its name that wants a key."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        (folder / "key").write_text(KEY)
        (folder / "key").chmod(0o600)
        self.folder = folder
        self.prefill = launch(
            model,
            folder / "prefill.log",
            transfer={"kv_connector": "FarfillConnector", **MODULE, "kv_role": "kv_producer"},
        )
        self.decode = launch(
            model,
            folder / "decode.log",
            f"--api-key={KEY}",
            "--enable-scale-out",
            "--scheduling-policy=priority",
            transfer={"kv_connector": "FarfillConnector", "kv_role": "kv_consumer"},
        )

    def attach(self, server: Served, model: Path | None = None) -> VllmEngine:
        engine = load_engine(
            ModelConfig(name="llama", path=model or self.model, dtype="float32"),
            EngineConfig(type="vllm", attach=server.url, attach_key="file:key", kv_cache_mb=256, prefix_cache_mb=0),
            PrefillConfig(chunked_prefill_tokens=CHUNK_TOKENS),
            self.folder,
            stall_s=20.0,
        )
        engine.start()
        return engine


@pytest.fixture(scope="module")
def two(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    fleet.drop()
    two = Two(fleet.model("llama"), tmp_path_factory.mktemp("attach"))
    with serving([two.prefill, two.decode]):
        yield two


@pytest.fixture(scope="module")
def engines(two: Two) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    with ThreadPoolExecutor(2) as threads:
        prefill, decode = threads.map(two.attach, (two.prefill, two.decode))
    yield prefill, decode
    prefill.close()
    decode.close()


def test_attached_engines_exchange_kv_with_the_tokens_of_one(engines: tuple[VllmEngine, VllmEngine]) -> None:
    prefill, decode = engines
    assert prefill.info.fingerprint == decode.info.fingerprint
    assert decode.info.kv_total_bytes == 256 << 20
    for length in (2, 5, 127, 128, 129, 257, 900, 1500):
        sink = far(prefill, decode, prompt_of(length))
        assert sink.stats is not None
        assert sink.stats.computed_tokens == 0
        assert sink.choices[0].token_ids == local(prefill, prompt_of(length))[0].token_ids


def test_both_dialects_say_the_same(engines: tuple[VllmEngine, VllmEngine]) -> None:
    """The prefill server has `/v1/completions` only, the other one vLLM's endpoint for token ids."""
    sampling = replace(GREEDY, max_tokens=6, logprobs=3, logit_bias={65: 1.0}, min_tokens=2)
    prompt = tuple(token % 90 for token in prompt_of(200))
    completions, tokens = (local(engine, prompt, sampling) for engine in engines)
    for one, other in zip(completions, tokens, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        for (chosen, others), (their_chosen, their_others) in zip(one.logprobs, other.logprobs, strict=True):
            assert chosen.logprob == pytest.approx(their_chosen.logprob, abs=1e-5)
            assert [item.token_id for item in others] == [item.token_id for item in their_others]


def test_priority_goes_where_it_is_heeded_and_is_left_out_elsewhere(engines: tuple[VllmEngine, VllmEngine]) -> None:
    for engine in engines:
        sink = Tokens()
        work = GenerateWork(request_id="g", prompt=prompt_of(50), cache_salt="p", sampling=GREEDY, priority=5)
        engine.generate(work, sink)
        assert len(sink.wait()[0].token_ids) == 24


def test_what_the_server_was_not_started_for_is_refused_with_the_flag(
    engines: tuple[VllmEngine, VllmEngine],
) -> None:
    grammar = replace(GREEDY, grammar="start: /[ab]{4}c/")
    with pytest.raises(InvalidRequestError, match=r"structured-outputs-config.backend=guidance"):
        start_local(engines[1], prompt_of(20), grammar)
    assert isinstance(engines[1].prepare(grammar).exception(5), InvalidRequestError)


def test_metrics_of_the_attached_server_are_relayed(engines: tuple[VllmEngine, VllmEngine]) -> None:
    for engine in engines:
        wait_until(lambda engine=engine: b"vllm:num_requests_running" in engine.load().exposition, "metrics", 10)


def test_requests_of_others_go_on_as_without_farfill(two: Two, engines: tuple[VllmEngine, VllmEngine]) -> None:
    body = {"model": str(two.model), "prompt": list(prompt_of(300)), "max_tokens": 24, "temperature": 0}
    answer = two.prefill.ask("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == local(engines[1], prompt_of(300))[0].token_ids


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_stranger_cannot_have_kv_left_elsewhere(
    two: Two, engines: tuple[VllmEngine, VllmEngine], tmp_path: Path, mode: int
) -> None:
    """Whoever may ask for tokens names a folder: only a worker's own counts."""
    folder = tmp_path / ("farfill-vllm-1-x" if mode == 0o755 else "elsewhere")
    folder.mkdir(mode=mode)
    os.chmod(folder, mode)
    params = {"farfill": {"type": "attach", "folder": str(folder), "chunk_tokens": 256}}
    body = {"model": str(two.model), "prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": params}
    two.prefill.ask("/v1/completions", body)
    wait_until(lambda: f"folder={folder}" in two.prefill.log() and "attach_refused" in two.prefill.log(), "refused", 5)
    assert far(*engines, prompt_of(300), salt=str(mode)).stats is not None


def test_a_worker_that_leaves_and_comes_back_finds_its_vllm_as_it_was(two: Two) -> None:
    expected = None
    for turn in range(2):
        engine = two.attach(two.prefill)
        folder = engine.folder
        sink = far(engine, engine, prompt_of(600), salt=f"turn{turn}")
        expected = expected or sink.choices[0].token_ids
        assert sink.choices[0].token_ids == expected
        engine.close()
        assert not folder.exists()
        assert two.prefill.healthy()


def test_a_worker_that_goes_under_load_leaves_vllm_running(two: Two) -> None:
    engine = two.attach(two.prefill)
    running = [start_local(engine, prompt_of(100 + i), LONG)[1] for i in range(3)]
    start_prefill(engine, prompt_of(3_000))
    for sink in running:
        assert sink.first.wait(60)
    engine.close()
    assert all(sink.error is not None for sink in running)
    again = two.attach(two.prefill)
    assert len(local(again, prompt_of(50))[0].token_ids) == 24
    again.check_integrity()
    again.close()


@late_or_not
def test_vllms_own_policy_for_kv_that_cannot_be_loaded_is_kept(
    engines: tuple[VllmEngine, VllmEngine], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started without one, vLLM fails such requests."""
    name_any_size(monkeypatch)
    assert_fails_alone(engines[1], late)


async def test_workers_as_processes_attach_serve_drain_and_leave_vllm(two: Two, tmp_path: Path) -> None:
    """`farfill worker --attach`: registered, a prompt prefilled far, SIGTERM finishes what runs."""
    overrides = {
        "engine": {"attach_key": "file:vllm.key", "kv_cache_mb": 256, "prefix_cache_mb": 0},
        "registry": {"lease_s": 5.0},
    }
    plan = local_plan(two.model, "tiny", chunk_tokens=CHUNK_TOKENS, timeout_ms=20_000, overrides=overrides)
    cluster = Cluster(plan, tmp_path, start_deadline_s=120.0)
    key = tmp_path / "vllm.key"
    key.touch(mode=0o600)
    key.write_text(KEY)
    try:
        for name in ("registry", "gateway"):
            cluster.spawn(name)
        for name, server in ((PREFILL, two.prefill), (DECODE, two.decode)):
            cluster.spawn(name, role="worker", options=("--engine", "vllm", "--attach", server.url))
        await asyncio.to_thread(cluster.wait_known, {PREFILL, DECODE})
        async with cluster.client() as client:
            corpus = await load_corpus(client)
            prompt = corpus.prompt_of(900, variant=1)
            distant = await client.complete(Generation(prompt=prompt, max_tokens=16, salt="far"))
            near = await client.complete(Generation(prompt=prompt, max_tokens=16, salt="near", forced="local"))
            assert (distant.placement, near.placement) == ("remote", "local")
            assert distant.token_ids == near.token_ids
            long = Generation(prompt=corpus.prompt_of(100, variant=2), max_tokens=400, salt="drain")
            running = asyncio.create_task(client.complete(long))
            await asyncio.to_thread(wait_until, lambda: running_requests(cluster), "the request runs")
            status = asyncio.create_task(asyncio.to_thread(cluster.stop, DECODE))
            assert len((await running).token_ids) == 400
            assert await status == 0
    finally:
        statuses = cluster.stop_all()
    assert set(statuses.values()) <= {0}, statuses
    assert two.prefill.healthy()
    assert two.decode.healthy()


def test_other_weights_are_refused(two: Two, fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"vLLM serves .*llama, model.path is .*qwen3"):
        two.attach(two.prefill, fleet.model("qwen3"))


def test_a_wrong_key_says_so(two: Two) -> None:
    (two.folder / "key").write_text("wrong")
    try:
        with pytest.raises(ConfigError, match=r"engine.attach: http.*Unauthorized"):
            two.attach(two.decode)
    finally:
        (two.folder / "key").write_text(KEY)


def test_vllm_that_goes_ends_what_it_was_doing_and_comes_back_to_be_attached(two: Two) -> None:
    """Its tokens before and after are the same, and nobody waits for ever."""
    engine = two.attach(two.decode)
    expected = local(engine, prompt_of(500))[0].token_ids
    _, sink = start_local(engine, prompt_of(100), LONG)
    assert sink.first.wait(60)
    family = two.decode.family()
    for process in family:
        process.kill()
    with pytest.raises(EngineError):
        sink.wait()
    wait_until(lambda: _dead(engine), "the engine knows", 15)
    engine.close()
    two.decode.process.wait()
    port = int(two.decode.url.rpartition(":")[2])
    transfer = {"kv_connector": "FarfillConnector", "kv_role": "kv_consumer"}
    arguments = (f"--api-key={KEY}", "--enable-scale-out", "--scheduling-policy=priority")
    two.decode = launch(two.model, two.folder / "decode2.log", *arguments, transfer=transfer, port=port)
    try:
        engine = two.attach(two.decode)  # waits for it
        assert local(engine, prompt_of(500))[0].token_ids == expected
        engine.close()
    finally:
        two.decode.stop()


def _dead(engine: VllmEngine) -> bool:
    try:
        engine.load()
    except EngineError:
        return True
    return False
