"""Connections of clients as bytes: framing that could smuggle requests, pipelining, slow readers, old clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from farfill.gateway.handlers import body as bodies
from support.gateway_harness import Harness, running_gateway

PATH = "/v1/completions"
DEADLINE_S = 20.0


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path) as harness:
        yield harness


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(gateway: Harness, **options: int) -> AsyncIterator[Connection]:
    host, _, port = gateway.base.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), **options)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield reader, writer
    finally:
        writer.close()


def body(**fields: object) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2, **fields}).encode()


def request(data: bytes, *headers: str, version: str = "1.1") -> bytes:
    framing = headers or (f"Content-Length: {len(data)}",)
    return "\r\n".join((f"POST {PATH} HTTP/{version}", "Host: x", *framing, "", "")).encode() + data


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    return int(head[0].split(" ")[1]), headers, await reader.readexactly(int(headers["content-length"]))


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        (f"Content-Length: {len(body())}", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", f"Content-Length: {len(body())}"),
        (f"Content-Length: {len(body())}", "Content-Length: 5"),
        (f"Content-Length: +{len(body())}",),
        ("Content-Length: -1",),
        ("Transfer-Encoding: gzip, identity",),
        ("Transfer-Encoding: chunked, chunked",),
        (f"Content-Length : {len(body())}",),
        (f"Content-Length: {len(body())}", " folded: x"),
    ],
)
async def test_framing_that_two_servers_could_read_differently_is_refused(
    gateway: Harness, headers: tuple[str, ...]
) -> None:
    async with connected(gateway) as (reader, writer):
        writer.write(request(body(), *headers) + SMUGGLED)
        status, _, text = await answer(reader)
        assert status == 400
        assert json.loads(text)["error"]["type"] == "invalid_request_error"
        assert await reader.read() == b"", "the connection ends with it"
    assert gateway.decode.decodes == []


async def test_bad_chunk_ends_the_connection(gateway: Harness) -> None:
    async with connected(gateway) as (reader, writer):
        writer.write(request(b"zz\r\nwhat\r\n", "Transfer-Encoding: chunked") + SMUGGLED)
        assert (await answer(reader))[0] == 400
        assert await reader.read() == b""
    assert gateway.decode.decodes == []


async def test_body_in_chunks_is_understood(gateway: Harness) -> None:
    data = body()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n"
    async with connected(gateway) as (reader, writer):
        head = request(b"", "Transfer-Encoding: chunked")
        for piece in (head[:20], head[20:] + chunks[:7], chunks[7:]):
            writer.write(piece)
            await writer.drain()
        status, headers, text = await answer(reader)
    assert status == 200
    assert json.loads(text)["choices"][0]["text"] == "w0 w1 "
    assert headers["x-farfill-placement"] == "local"


async def test_pipelined_requests_are_answered_in_order(gateway: Harness) -> None:
    asked = [request(body(request_id=f"r{i}")) for i in range(5)]
    async with connected(gateway) as (reader, writer):
        writer.write(b"".join([*asked, SMUGGLED, asked[0]]))
        for i in range(5):
            status, headers, _ = await answer(reader)
            assert (status, headers["x-request-id"]) == (200, f"r{i}")
        assert json.loads((await answer(reader))[2])["object"] == "list"
        assert (await answer(reader))[1]["x-request-id"] == "r0"


async def test_old_client_gets_a_stream_that_ends_with_the_connection(gateway: Harness) -> None:
    async with connected(gateway) as (reader, writer):
        writer.write(request(body(stream=True), version="1.0"))
        head, _, text = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"Connection: close" in head
    assert text.startswith(b"data: {")
    assert text.endswith(b"data: [DONE]\n\n")


async def test_connection_that_is_to_close_closes(gateway: Harness) -> None:
    async with connected(gateway) as (reader, writer):
        writer.write(request(body(), f"Content-Length: {len(body())}", "Connection: close"))
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""


@pytest.mark.parametrize("framing", ["Content-Length: 90", "Transfer-Encoding: chunked"])
async def test_body_that_does_not_come_ends_the_connection(
    gateway: Harness, monkeypatch: pytest.MonkeyPatch, framing: str
) -> None:
    monkeypatch.setattr(bodies, "GRACE_S", 0.05)
    monkeypatch.setattr(bodies, "SLOWEST_BYTES_PER_S", 1 << 40)
    async with connected(gateway) as (reader, writer):
        writer.write(request(b"1\r\n{\r\n", framing))
        status, headers, data = await answer(reader)
        assert (status, json.loads(data)["error"]["code"]) == (408, "body_too_slow")
        assert await reader.read() == b""
    assert gateway.observer.finished[-1].outcome == "client_error"
    assert headers["x-request-id"]


async def test_body_that_comes_late_is_served(gateway: Harness) -> None:
    async with connected(gateway) as (reader, writer):
        whole = request(body())
        writer.write(whole[:-5])
        await writer.drain()
        for _ in range(20):
            await asyncio.sleep(0)
        writer.write(whole[-5:])
        status, _, _ = await answer(reader)
        assert status == 200


async def test_slow_reader_stops_the_worker_and_loses_nothing(gateway: Harness) -> None:
    """What is held between worker and client stays bounded: the worker's own writes wait."""
    texts, piece = 400, "x" * 50_000
    gateway.decode.texts = [piece] * texts
    async with connected(gateway, limit=4096) as (reader, writer):
        writer.write(request(body(stream=True, max_tokens=texts)))
        await reader.readuntil(b"\r\n\r\n")
        held = await _settled(gateway)
        assert held < texts, "the worker sent everything to nobody"
        got = 0
        while data := await reader.read(1 << 20):
            got += data.count(b"x")
            if data.endswith(b"0\r\n\r\n"):
                break
    assert got >= texts * len(piece)


async def _settled(gateway: Harness) -> int:
    """How many events the worker has sent, once it sends no more."""
    before, same = -1, 0
    while same < 20:
        now = gateway.decode.events_sent
        same, before = (same + 1, before) if now == before else (0, now)
        await asyncio.sleep(0.01)
    return before
