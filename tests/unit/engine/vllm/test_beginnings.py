"""What a generation tells of its prompt: how much vLLM had, loaded or computed, before its first token is shown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.core.sampling import SamplingParams
from farfill.engine.fake import EOS_ID, byte_tokenizer
from farfill.engine.output import Vocabulary
from farfill.engine.protocol import GenerateWork, PrefillStats, TokenEvent
from farfill.engine.vllm.api import Endpoint, VllmApi
from farfill.engine.vllm.files import KVFile, KVFolder
from farfill.engine.vllm.jobs import GenerateJob
from farfill.engine.vllm.messages import ImportParams, WatchParams, read_params
from farfill.kv.manifest import build_manifest

LAYOUT = KVLayout((TensorLayout(0, "kv", TensorKind.FULL, "uint8", (64,), row_tokens=4),), 8)
WORK = GenerateWork(
    request_id="r", prompt=tuple(range(65, 83)), cache_salt="s", sampling=SamplingParams(max_tokens=2, temperature=0.0)
)
TOKENS = 17


class Heard:
    """A `TokenSink`: whatever it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def prefilled(self, stats: PrefillStats) -> None:
        self.heard.append(stats)

    def token(self, event: TokenEvent) -> None:
        self.heard.append(event)

    def failed(self, error: Exception) -> None:
        self.heard.append(error)


class Bench:
    """One generation, something in vLLM's place that answers at once, and the sink."""

    def __init__(self, api: VllmApi, folder: KVFolder) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answered = asyncio.Event()
        self.sink = Heard()
        self._api, self._folder = api, folder

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        choice = {"index": 0, "token_ids": [65], "finish_reason": "length"}
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())
        self.answered.set()
        return response

    def start(self, valid_tokens: int = 0, **options: Any) -> tuple[GenerateJob, KVFile | None]:
        file = self._folder.open(build_manifest(LAYOUT, TOKENS)) if valid_tokens else None
        job = GenerateJob(
            WORK,
            self.sink,
            file,
            valid_tokens=valid_tokens,
            fields={},
            vocabulary=Vocabulary.of(byte_tokenizer(), frozenset({EOS_ID}), 300),
            api=self._api,
            loop=asyncio.get_running_loop(),
            over=lambda _: None,
            **{"watch": "w", **options},
        )
        job.launch()
        return job, file

    async def stats(self, job: GenerateJob) -> PrefillStats:
        await asyncio.wait_for(job.ended.wait(), 10)
        stats, event = self.sink.heard
        assert isinstance(event, TokenEvent)
        assert isinstance(stats, PrefillStats)
        return stats


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    api, folder = VllmApi(Endpoint(socket=tmp_path / "api.sock")), KVFolder(1 << 20)
    bench, app = Bench(api, folder), web.Application()
    app.router.add_post("/inference/v1/generate", bench.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "api.sock")).start()
    await api.open()
    yield bench
    await api.close()
    folder.close()
    await runner.cleanup()


async def test_the_first_token_waits_for_what_vllm_had(bench: Bench) -> None:
    job, _ = bench.start()
    await bench.answered.wait()
    assert read_params(bench.bodies[0]["kv_transfer_params"]) == WatchParams(job.key)
    assert not bench.sink.heard
    job.begun(8)
    job.begun(16)  # another choice, which finds what the first one computed
    stats = await bench.stats(job)
    assert (stats.cached_tokens, stats.computed_tokens, stats.kv_problem) == (8, 9, "")


@pytest.mark.parametrize(("local", "processes"), [(0, 1), (8, 2), (16, 1)])
async def test_the_first_token_waits_until_every_process_loaded(bench: Bench, local: int, processes: int) -> None:
    job, file = bench.start(valid_tokens=16, processes=processes)
    assert file is not None
    assert job.key == file.key
    await bench.answered.wait()
    assert isinstance(read_params(bench.bodies[0]["kv_transfer_params"]), ImportParams)
    job.begun(local)
    if local < 16:
        for rank in range(processes):
            assert not bench.sink.heard
            job.loaded(rank)
    stats = await bench.stats(job)
    assert (stats.cached_tokens, stats.computed_tokens, stats.kv_problem) == (0, 1, "")


async def test_kv_that_vllm_could_not_load_is_told(bench: Bench) -> None:
    job, file = bench.start(valid_tokens=16, processes=2)
    assert file is not None
    await bench.answered.wait()
    job.begun(4)
    job.loaded(0)
    assert not job.not_loaded("another", "broken: whatever")
    assert job.not_loaded(file.key, "broken: too short")
    assert not job.not_loaded(file.key, "broken: known")
    stats = await bench.stats(job)
    assert (stats.cached_tokens, stats.computed_tokens, stats.kv_problem) == (4, 13, "broken: too short")


@pytest.mark.parametrize("options", [{"watch": ""}, {}], ids=["an older connector", "nobody tells"])
async def test_whoever_is_not_told_does_not_wait_for_ever(
    bench: Bench, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farfill.engine.vllm.jobs.BEGUN_S", 0.01)
    job, _ = bench.start(**options)
    stats = await bench.stats(job)
    assert (stats.cached_tokens, stats.computed_tokens) == (0, TOKENS)
    assert ("kv_transfer_params" in bench.bodies[0]) is not bool(options)
