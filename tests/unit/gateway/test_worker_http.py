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


async def test_interim_answers_are_passed_over():
    async with running() as (server, pool, endpoint):
        server.answer = b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE
        for _ in range(2):
            answer = await pool.request(endpoint, HEAD, b"hi")
            assert (answer.status, await answer.read()) == (200, b"ok")
        assert server.connections == 1


@pytest.mark.parametrize(
    "answer", [WHOLE + WHOLE, WHOLE.replace(b"Content-Length", b"Connection: close\r\nContent-Length")]
)
async def test_connection_with_more_or_nothing_to_come_is_not_used_again(answer: bytes):
    async with running() as (server, pool, endpoint):
        server.answer = answer
        for _ in range(2):
            assert await (await pool.request(endpoint, HEAD, b"hi")).read() == b"ok"
            await server.closed.acquire()
        assert server.connections == 2


async def test_head_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch):
    async with running() as (server, pool, endpoint):
        server.answer = b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * worker_http.MAX_HEAD_BYTES
        with pytest.raises(BrokenError, match="head"):
            await pool.request(endpoint, HEAD, b"hi")


async def test_answer_that_ends_with_its_connection_is_broken_but_what_came_is_told():
    async with running() as (server, pool, endpoint):
        server.answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
        answer = await pool.request(endpoint, HEAD, b"hi")
        assert await answer.readany() == b"ok"
        waiting = asyncio.create_task(answer.readany())
        await asyncio.sleep(0)
        answer.close()
        with pytest.raises(BrokenError):
            await waiting
        await server.closed.acquire()


async def test_long_body_is_sent_in_pieces():
    body, came = b"b" * (5 * worker_http.PIECE_BYTES + 1), asyncio.Queue[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await came.put((await reader.readexactly(len(HEAD) + len(body)))[len(HEAD) :])
        writer.write(WHOLE)
        writer.close()

    listening, pool = await asyncio.start_server(serve, "127.0.0.1", 0), WorkerConnections(2.0)
    async with listening, asyncio.timeout(DEADLINE_S):
        endpoint = Endpoint("127.0.0.1", listening.sockets[0].getsockname()[1], None, None)
        assert await (await pool.request(endpoint, HEAD, body)).read() == b"ok"
        assert await came.get() == body
        pool.close()


async def test_long_answer_is_whole():
    async with running() as (server, pool, endpoint):
        size = 40 * worker_http.READ_BYTES
        server.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"a" * size
        answer = await pool.request(endpoint, HEAD, b"hi")
        assert len(await answer.read()) == size
        answer = await pool.request(endpoint, HEAD, b"hi")
        assert len(await answer.read(100)) == 100
        answer.close()


async def test_unread_answer_is_not_read_from_the_connection_either():
    async with running() as (server, pool, endpoint):
        server.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 28) + b"a" * (1 << 26)
        answer = await pool.request(endpoint, HEAD, b"hi")
        first = await answer.readany()
        for _ in range(100):
            await asyncio.sleep(0)
        second = await answer.readany()
        assert len(first) <= len(second) < 16 * worker_http.READ_BYTES
        answer.close()
