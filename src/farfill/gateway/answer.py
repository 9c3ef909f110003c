"""Answers of generations, written to a connection of aiohttp's server as they are: one write for the head and what
follows at once, one for each piece of a stream.

`web.StreamResponse` does the same for any web application, at several times the cost; the rest of the API uses it.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import HttpVersion11

from farfill.gateway.handlers.request_id import HEADER, REQUEST_ID

_STREAM_HEAD = (
    "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    # reverse proxies must not hold tokens back
    "X-Accel-Buffering: no\r\n"
)


class Answer(web.StreamResponse):
    """The answer to one request: `whole`, or `begin`, `put` and `end`. aiohttp gets it back when it was sent.

    `whole`, `drained` and `end` wait while the client does not read; ConnectionError when it went away.
    """

    def __init__(self, request: web.Request) -> None:
        # None of what a StreamResponse sets up: aiohttp asks this class for nothing but what is overridden here.
        self._to = request
        self._connection = request.protocol
        self._chunked = request.version >= HttpVersion11
        self._alive = request.keep_alive and self._chunked
        self._pending = b""
        self._begun = False
        self._over = False

    @property
    def begun(self) -> bool:
        """Whether the client has seen a status."""
        return self._begun

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection may serve another request."""
        return self._alive and self._over

    async def whole(self, body: bytes, headers: Mapping[str, str]) -> None:
        """JSON, all at once."""
        head = self._head(headers)
        await self._send(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        self._over = True

    def begin(self, headers: Mapping[str, str]) -> None:
        """A stream of server-sent events; its head goes out with what is written first."""
        framing = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        self._pending = f"{self._head(headers)}{_STREAM_HEAD}{framing}\r\n".encode()

    def put(self, data: bytes) -> bool:
        """A piece of the stream. False: the client is behind; wait for `drained` before the next one."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._pending:
            data, self._pending = self._pending + data, b""
        connection = self._connection
        if connection.transport is None:
            raise ConnectionResetError("the client went away")
        self._begun = True
        connection.transport.write(data)
        return not connection.writing_paused

    async def drained(self) -> None:
        """Wait until the client has read enough of what was written."""
        if self._connection.writing_paused:
            await self._connection._drain_helper()  # as its own writer does

    async def end(self, data: bytes) -> None:
        """The last piece, and the end of the stream, in one write."""
        if self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        if self._pending:
            data, self._pending = self._pending + data, b""
        await self._send(data)
        self._over = True

    async def prepare(self, request: web.BaseRequest) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """aiohttp's turn to begin: it has been sent."""

    async def write_eof(self, data: bytes = b"") -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """aiohttp's turn to end: it has ended."""

    def _head(self, headers: Mapping[str, str]) -> str:
        lines = ["HTTP/1.1 200 OK", f"Date: {rfc822_formatted_time()}"]
        lines.append(f"{HEADER}: {self._to[REQUEST_ID]}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not self._alive:
            lines.append("Connection: close")
        head = "\r\n".join(lines)
        if "\n" in head.replace("\r\n", "") or head.count("\r\n") != len(lines) - 1:
            raise ValueError("a header has a line break")
        return head + "\r\n"

    async def _send(self, data: bytes) -> None:
        connection = self._connection
        if connection.transport is None:
            raise ConnectionResetError("the client went away")
        self._begun = True
        connection.transport.write(data)
        if connection.writing_paused:
            await connection._drain_helper()  # as its own writer does
