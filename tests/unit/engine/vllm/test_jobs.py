"""Requests of vLLM's that are withdrawn, fail or never answer: the sink hears of exactly one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from farfill.core.errors import CancelledWorkError, EngineError, InvalidRequestError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.protocol import PrefillStats, PrefillWork
from farfill.engine.vllm.api import Endpoint, VllmApi
from farfill.engine.vllm.files import KVFolder
from farfill.engine.vllm.jobs import Exports, Job, PrefillJob
from farfill.kv.manifest import build_manifest

LAYOUT = KVLayout((TensorLayout(0, "kv", TensorKind.FULL, "uint8", (64,), row_tokens=4),), 8)
WORK = PrefillWork(request_id="r", prompt=tuple(range(18)), cache_salt="s")


class Heard:
    """A `PrefillSink`."""

    def __init__(self) -> None:
        self.pieces: list[int] = []
        self.ends: list[Exception | PrefillStats] = []

    def progress(self) -> None:
        pass

    def pieces_ready(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        self.pieces += [index for index, _ in pieces]

    def finished(self, stats: PrefillStats) -> None:
        self.ends.append(stats)

    def failed(self, error: Exception) -> None:
        self.ends.append(error)


class Server:
    """In vLLM's place: answers with `status` and `answer` once `may_answer` is set."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.status = 200
        self.answer: dict[str, object] = {"usage": {"prompt_tokens_details": {"cached_tokens": 4}}}

    async def handle(self, _: web.Request) -> web.Response:
        self.asked.set()
        await self.may_answer.wait()
        return web.json_response(self.answer, status=self.status)


class Bench:
    """One job, its server, its sink and its folder."""

    def __init__(self, server: Server, api: VllmApi, folder: KVFolder) -> None:
        self.server = server
        self.folder = folder
        self.heard = Heard()
        self.over: list[Job] = []
        file = folder.open(build_manifest(LAYOUT, 17))
        loop = asyncio.get_running_loop()
        self.job = PrefillJob(WORK, self.heard, Exports(file, (1,)), api=api, loop=loop, over=self.over.append)

    async def end(self) -> Exception | PrefillStats:
        await asyncio.wait_for(self.job.ended.wait(), 10)
        assert self.over == [self.job]
        (end,) = self.heard.ends
        self.job.release()
        assert self.folder.used_bytes == 0
        assert self.folder.orphans() == []
        return end


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    server = Server()
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "api.sock")).start()
    api = VllmApi(Endpoint(socket=tmp_path / "api.sock"))
    await api.open()
    folder = KVFolder(1 << 20)
    try:
        yield Bench(server, api, folder)
    finally:
        server.may_answer.set()
        folder.close()
        await api.close()
        await runner.cleanup()


async def test_finished_when_answered_and_all_pieces_are_out(bench: Bench) -> None:
    bench.job.launch()
    await bench.server.asked.wait()
    assert bench.job.waiting
    bench.job.exported((0, 1), 0)
    bench.job.exported((1, 2), 0)
    assert not bench.job.waiting
    bench.server.may_answer.set()
    stats = await bench.end()
    assert isinstance(stats, PrefillStats)
    assert (stats.computed_tokens, stats.cached_tokens) == (13, 4)
    assert bench.heard.pieces == [0, 1, 2]


@pytest.mark.parametrize("when", ["before it is launched", "before it runs", "while it runs"])
async def test_withdrawn_at_any_time_ends_once(bench: Bench, when: str) -> None:
    if when == "before it is launched":
        bench.job.cancel()
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(bench.job.launch)
    if when == "while it runs":
        await bench.server.asked.wait()
    bench.job.cancel()
    bench.job.cancel()
    assert isinstance(await bench.end(), CancelledWorkError)


async def test_failed_export_ends_it_although_vllm_does_not_answer(bench: Bench) -> None:
    bench.job.launch()
    await bench.server.asked.wait()
    bench.job.end(EngineError("no space"))
    error = await bench.end()
    assert isinstance(error, EngineError)
    assert str(error) == "no space"


async def test_pieces_that_never_come_are_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farfill.engine.vllm.jobs.LAST_EXPORTS_S", 0.01)
    bench.job.launch()
    bench.server.may_answer.set()
    await bench.server.asked.wait()
    error = await bench.end()
    assert isinstance(error, EngineError)
    assert "did not export 3 pieces" in str(error)


@pytest.mark.parametrize(
    ("status", "answer", "kind", "text"),
    [
        (400, {"error": {"message": "too long"}}, InvalidRequestError, "too long"),
        (500, {"error": {"message": "it broke"}}, EngineError, "answered 500: it broke"),
    ],
)
async def test_refusals_say_whose_fault_it_is(
    bench: Bench, status: int, answer: dict[str, object], kind: type[Exception], text: str
) -> None:
    bench.server.status, bench.server.answer = status, answer
    bench.server.may_answer.set()
    bench.job.launch()
    error = await bench.end()
    assert type(error) is kind
    assert text in str(error)
