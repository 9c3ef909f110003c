"""Connections to workers: aiohttp's client protocol and parser, without what its session does for the web at large.

No cookies, no redirects, no proxies, no URL handling: a request is one write, an answer a status and a stream of bytes.
`benchmarks/gateway.py` says what that is worth.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import NamedTuple

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

IDLE_S = 15.0
"""An idle connection is not used again after so long: the other side may be about to close it."""
PIECE_BYTES = 256 * 1024
"""Longer bodies are sent piece by piece, so that the loop stays responsive."""
READ_BYTES = 64 * 1024


class UnreachedError(Exception):
    """There was no connection to be had; nothing was sent. `timed_out`: nobody said so."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class BrokenError(Exception):
    """The connection was there, and broke."""


class Endpoint(NamedTuple):
    """Where a worker listens. `tls` None: plain HTTP; `name` is what its certificate is checked for."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    name: str | None


class Answer:
    """The answer to one request. Read it to its end, or `close` it, which ends the connection."""

    def __init__(self, status: int, payload: StreamReader, connection: _Connection) -> None:
        self.status = status
        self._payload = payload
        self._connection = connection

    async def readany(self) -> bytes:
        """What is there, waiting for at least one byte; empty at the end. Raises BrokenError."""
        try:
            return await self._payload.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenError(repr(error)) from error

    async def read(self, limit: int = -1) -> bytes:
        """All of it, or the first `limit` bytes. Raises BrokenError."""
        try:
            return await self._payload.read(limit)
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenError(repr(error)) from error

    def close(self) -> None:
        """Idempotent; without effect when it was read to its end. Whoever waits for more hears BrokenError."""
        if not self._payload.is_eof():
            self._connection.close()
            if self._payload.exception() is None:
                self._payload.set_exception(aiohttp.ClientConnectionError("closed here"))


class WorkerConnections:
    """Pools by endpoint. Owned by the event loop."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Endpoint, deque[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._connecting: dict[tuple[str, int], set[asyncio.Timeout]] = {}

    async def request(self, endpoint: Endpoint, head: bytes, body: bytes) -> Answer:
        """Send `head` (with its empty line) and `body`; returns when the head of the answer is there.

        Raises UnreachedError or BrokenError. Cancelling it closes the connection.
        """
        connection = self._take(endpoint)
        if connection is None:  # an idle one is false: its queue of answers is empty
            connection = await self._connect(endpoint)
        self._busy.add(connection)
        try:
            return await connection.exchange(head, body)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.close()

    def ended(self, connection: _Connection, *, reusable: bool) -> None:
        """Its answer was read to its end, or it was closed."""
        self._busy.discard(connection)
        if reusable:
            self._idle.setdefault(connection.endpoint, deque()).append(connection)

    def _take(self, endpoint: Endpoint) -> _Connection | None:
        """The idle connection used last."""
        idle = self._idle.get(endpoint)
        if not idle:
            return None
        _close_old(idle)
        while idle:
            found = idle.pop()
            if found.is_connected() and not found.should_close:
                return found
            found.close()
        return None

    async def reach(self, endpoint: Endpoint) -> bool:
        """Whether a connection can be made now; it is kept for the next request."""
        try:
            await self._open(endpoint)
        except UnreachedError:
            return False
        return True

    async def gone(self, endpoint: Endpoint) -> bool:
        """Whether nobody is there any more, by word of its host: neither one that answers nor silence."""
        try:
            await self._open(endpoint)
        except UnreachedError as error:
            return not error.timed_out
        return False

    async def _open(self, endpoint: Endpoint) -> None:
        connection = await self._connect(endpoint)
        connection.idle_since_s = asyncio.get_running_loop().time()
        self.ended(connection, reusable=True)

    async def _connect(self, endpoint: Endpoint) -> _Connection:
        # A good moment to let go of endpoints that nobody asks any more: gone workers, certificates of yesterday.
        for other, idle in list(self._idle.items()):
            _close_old(idle)
            if not idle:
                del self._idle[other]
        loop = asyncio.get_running_loop()
        others = self._connecting.setdefault((endpoint.host, endpoint.port), set())
        timeout = asyncio.timeout(self._connect_timeout_s)
        try:
            async with timeout:
                others.add(timeout)
                _, made = await loop.create_connection(
                    lambda: _Connection(loop, self, endpoint),
                    endpoint.host,
                    endpoint.port,
                    ssl=endpoint.tls,
                    server_hostname=(endpoint.name or endpoint.host) if endpoint.tls is not None else None,
                )
        except OSError as error:  # timeouts and what TLS refuses among them
            if timeout.expired():  # who waits for the same address waits in vain
                for other in others - {timeout}:
                    if not other.expired():
                        other.reschedule(loop.time())
            raise UnreachedError(repr(error), timed_out=timeout.expired()) from error
        finally:
            others.discard(timeout)
            if not others:
                self._connecting.pop((endpoint.host, endpoint.port), None)
        return made


def _close_old(idle: deque[_Connection]) -> None:
    """Those that were idle for too long: the oldest are on the left."""
    late_s = asyncio.get_running_loop().time() - IDLE_S
    while idle and (idle[0].idle_since_s < late_s or not idle[0].is_connected()):
        idle.popleft().close()


class _Connection(ResponseHandler):
    """One connection, which serves one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: WorkerConnections, endpoint: Endpoint) -> None:
        super().__init__(loop)
        self.endpoint = endpoint
        self.idle_since_s = 0.0
        self._pool = pool

    async def exchange(self, head: bytes, body: bytes) -> Answer:
        self.set_response_params(read_until_eof=True, auto_decompress=False, read_bufsize=READ_BYTES)
        try:
            await self._send(head, body)
            message, payload = await self.read()
            while 100 <= message.code < 200:
                message, payload = await self.read()
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
            raise BrokenError(repr(error)) from error
        payload.on_eof(lambda: self._ended(message))
        return Answer(message.code, payload, self)

    def close(self) -> None:
        super().close()
        self._pool.ended(self, reusable=False)

    async def _send(self, head: bytes, body: bytes) -> None:
        if self.transport is None:
            raise ConnectionResetError("closed by the other side")
        if len(body) <= PIECE_BYTES:
            self.transport.write(head + body)
            return
        self.transport.write(head)
        for begin in range(0, len(body), PIECE_BYTES):
            await self._drain_helper()
            self.transport.write(body[begin : begin + PIECE_BYTES])
            await asyncio.sleep(0)

    def _ended(self, message: RawResponseMessage) -> None:
        if message.should_close or not self.is_connected():
            self.close()
            return
        self.idle_since_s = self._loop.time()
        self._pool.ended(self, reusable=True)
