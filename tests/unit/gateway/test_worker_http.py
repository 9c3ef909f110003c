"""Connections to workers: used again, given up when idle for long, ended when their answer is not wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from farfill.gateway import worker_http
from farfill.gateway.worker_http import BrokenError, Endpoint, UnreachedError, WorkerConnections

HEAD = b"POST /v1/decode HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
DEADLINE_S = 10.0


class Server:
    """Answers every request with `answer`; `closed` is released for each connection that ends."""

    def __init__(self) -> None:
        self.answer = WHOLE
        self.connections = 0
        self.closed = asyncio.Semaphore(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.read(1 << 20):
                writer.write(self.answer)
        finally:
            writer.close()
            self.closed.release()


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Server, WorkerConnections, Endpoint]]:
    server, pool = Server(), WorkerConnections(2.0)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server, pool, Endpoint("127.0.0.1", listening.sockets[0].getsockname()[1], None, None)
    finally:
        pool.close()
        listening.close()


async def test_connection_is_used_again():
    async with running() as (server, pool, endpoint):
        for _ in range(3):
            answer = await pool.request(endpoint, HEAD, b"hi")
            assert (answer.status, await answer.read()) == (200, b"ok")
            answer.close()
        assert server.connections == 1


async def test_answer_that_is_not_wanted_ends_its_connection():
    async with running() as (server, pool, endpoint):
        server.answer = WHOLE[:-1]
        answer = await pool.request(endpoint, HEAD, b"hi")
        answer.close()
        await server.closed.acquire()
        server.answer = WHOLE
        assert await (await pool.request(endpoint, HEAD, b"hi")).read() == b"ok"
        assert server.connections == 2


async def test_idle_connection_is_given_up(monkeypatch: pytest.MonkeyPatch):
    async with running() as (server, pool, endpoint):
        await (await pool.request(endpoint, HEAD, b"hi")).read()
        monkeypatch.setattr(worker_http, "IDLE_S", -1.0)
        await (await pool.request(endpoint, HEAD, b"hi")).read()
        await server.closed.acquire()
        assert server.connections == 2


async def test_answer_that_breaks_off_and_nobody_there():
    async with running() as (server, pool, endpoint):
        server.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        with pytest.raises(BrokenError):
            await (await pool.request(endpoint, HEAD, b"hi")).read()
        server.answer = b"nothing of HTTP\r\n\r\n"
        with pytest.raises(BrokenError):
            await pool.request(endpoint, HEAD, b"hi")
    with pytest.raises(UnreachedError):
        await pool.request(endpoint, HEAD, b"hi")
