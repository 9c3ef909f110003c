"""An answer that flows: each read is handed on at once and whole; what its taker wants and raises is heeded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools
import pytest

from farfill.gateway.worker_http import Answer, BrokenError, Endpoint, WorkerConnections
from farfill.gateway.worker_http import _Connection as Connection

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Line(asyncio.Transport):
    """A connection's transport; what it is asked is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def began() -> tuple[Connection, Line, Answer]:
    """A connection on which an answer has begun."""
    line = Line()
    connection = Connection(asyncio.get_running_loop(), WorkerConnections(1.0), Endpoint("h", 1, None, None))
    connection.connection_made(line)
    asking = asyncio.create_task(connection.exchange(b"", b""))
    await asyncio.sleep(0)
    connection.data_received(HEAD)
    return connection, line, await asking


async def flowing(answer: Answer, take: Callable[[bytes], bool]) -> asyncio.Task[bool]:
    task = asyncio.create_task(answer.flow(take))
    await asyncio.sleep(0)
    return task


async def test_what_one_read_brings_is_one_call_at_once():
    connection, _, answer = await began()
    connection.data_received(chunk(b"a"))
    seen: list[bytes] = []

    def take(data: bytes) -> bool:
        seen.append(data)
        return True

    task = await flowing(answer, take)
    assert seen == [b"a"]
    connection.data_received(chunk(b"b") + chunk(b"c"))
    assert seen == [b"a", b"bc"]  # nobody had to wake up for it
    connection.data_received(chunk(b"d") + END)
    assert not await task
    assert seen == [b"a", b"bc", b"d"]
    assert answer.over


async def test_taker_that_wants_no_more_gets_the_rest_later():
    connection, line, answer = await began()
    seen: list[bytes] = []
    task = await flowing(answer, lambda data: bool(seen.append(data)))
    connection.data_received(chunk(b"a"))
    connection.data_received(chunk(b"b" * 200_000))
    assert await task
    assert seen == [b"a"]
    assert line.paused  # nothing is read ahead without bound
    connection.data_received(END)
    assert await answer.flow(lambda data: bool(seen.append(data)))
    assert seen[1:] == [b"b" * 200_000]
    assert not line.paused
    assert not await answer.flow(lambda _: True)


@pytest.mark.parametrize("data", [chunk(b"a"), chunk(b"a") + END])
async def test_what_the_taker_raises_is_raised_to_who_waits(data: bytes):
    connection, _, answer = await began()

    def take(data: bytes) -> bool:
        raise ValueError(data)

    task = await flowing(answer, take)
    connection.data_received(data)
    with pytest.raises(ValueError, match="a"):
        await task


async def test_end_of_a_flow_by_breaking_by_closing_and_by_cancelling():
    connection, _, answer = await began()
    seen: list[bytes] = []
    task = await flowing(answer, lambda data: seen.append(data) is None)
    connection.data_received(chunk(b"a"))
    connection.connection_lost(None)
    with pytest.raises(BrokenError, match="other side"):
        await task

    connection, line, answer = await began()
    task = await flowing(answer, lambda data: seen.append(data) is None)
    answer.close()
    with pytest.raises(BrokenError, match="closed here"):
        await task
    assert line.closed

    connection, _, answer = await began()
    task = await flowing(answer, lambda data: seen.append(data) is None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    connection.data_received(chunk(b"b"))
    assert seen == [b"a"]
    assert await answer.readany() == b"b"


async def test_what_is_no_http_ends_a_flow_after_what_came_before():
    connection, line, answer = await began()
    seen: list[bytes] = []
    task = await flowing(answer, lambda data: seen.append(data) is None)
    connection.data_received(chunk(b"a") + b"zz\r\n")
    with pytest.raises(BrokenError, match=httptools.HttpParserError.__name__):
        await task
    assert seen == [b"a"]
    assert line.closed
