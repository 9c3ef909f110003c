"""Attaching to something that answers like vLLM: waited for, asked in the dialect it has, and told apart from ours."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from farfill.core.errors import CancelledWorkError, ConfigError, EngineError
from farfill.engine.vllm import attached
from farfill.engine.vllm.api import Endpoint
from farfill.engine.vllm.attached import AttachedServer
from farfill.engine.vllm.messages import AttachParams, CacheTensor, Hello, read_params, send

HELLO = Hello(1, "0.32", "cpu:amx", "auto/float32", 0, 1, 100, 4096, (CacheTensor(0, "full", "full", 128, 4096),))


class Server:
    """In vLLM's place, on a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.healthy = True
        self.open_status = 422  # of the endpoint for token ids: it complains of an empty body
        self.models_status = 200
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.on_attach: Callable[[AttachParams], None] = lambda _: None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self.path)).start()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}], "error": "Unauthorized"}, status=self.models_status)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body:
            return web.Response(status=self.open_status)
        return self._answer(request, body)

    async def _complete(self, request: web.Request) -> web.Response:
        return self._answer(request, await request.json())

    def _answer(self, request: web.Request, body: dict[str, object]) -> web.Response:
        self.asked.append((request.path, body))
        params = read_params(body["kv_transfer_params"])
        assert isinstance(params, AttachParams)
        self.on_attach(params)
        return web.json_response({"choices": []})

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(attached, "_POLL_S", 0.01)
    monkeypatch.setattr(attached, "_HELLO_S", 0.05)
    server = Server(tmp_path / "vllm.sock")
    yield server
    server.close()


@pytest.fixture
def ours(server: Server, tmp_path: Path) -> Iterator[AttachedServer]:
    (tmp_path / "folder").mkdir()
    ours = AttachedServer(Endpoint(socket=server.path), tmp_path / "folder", chunk_tokens=256)
    yield ours
    ours.stop()


@pytest.mark.parametrize(("status", "path"), [(422, "/inference/v1/generate"), (403, "/v1/completions")])
def test_its_connector_comes_where_it_is_told(server: Server, ours: AttachedServer, status: int, path: str) -> None:
    server.open_status = status
    lines: list[socket.socket] = []

    def connect(params: AttachParams) -> None:
        assert params.chunk_tokens == 256
        lines.append(socket.socket(socket.AF_UNIX))
        lines[0].connect(f"{params.folder}/line.sock")
        send(lines[0], HELLO)

    server.on_attach = connect
    try:
        assert ours.wait_ready(10, lambda: False) == [HELLO]
    finally:
        for line in lines:
            line.close()
    assert [asked for asked, _ in server.asked] == [path]
    assert ours.running


def test_a_vllm_without_the_connector_says_what_to_start_it_with(ours: AttachedServer) -> None:
    with pytest.raises(ConfigError, match="its connector did not come") as caught:
        ours.wait_ready(10, lambda: False)
    assert '"kv_connector": "FarfillConnector"' in str(caught.value)


def test_one_that_is_not_ready_is_waited_for(server: Server, ours: AttachedServer) -> None:
    server.healthy = False
    looks = iter(range(5))
    with pytest.raises(CancelledWorkError):
        ours.wait_ready(10, lambda: next(looks) == 4)
    with pytest.raises(EngineError, match="/health answers 503"):
        ours.wait_ready(0.02, lambda: False)


def test_a_wrong_key_is_the_configurations_fault(server: Server, ours: AttachedServer) -> None:
    server.open_status, server.models_status = 403, 401
    with pytest.raises(ConfigError, match="Unauthorized"):
        ours.wait_ready(10, lambda: False)
