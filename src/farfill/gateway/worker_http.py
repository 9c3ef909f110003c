"""Connections to workers: HTTP/1.1 with httptools' parser, without what a client does for the web at large.

No cookies, no redirects, no proxies, no URL handling: a request is one write, an answer a status and a stream of bytes.
The other side is one of ours, known by its certificate; what it may cost us is bounded all the same. ADR 0025 says why.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

import httptools

IDLE_S = 15.0
"""An idle connection is not used again after so long: the other side may be about to close it."""
PIECE_BYTES = 256 * 1024
"""Longer bodies are sent piece by piece, so that the loop stays responsive."""
READ_BYTES = 128 * 1024
"""Nothing more is read from a connection while so much waits to be taken."""
MAX_HEAD_BYTES = 64 * 1024


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

    __slots__ = ("_connection", "_ended", "_error", "_pieces", "_raised", "_size", "_take", "_waiter", "status")

    def __init__(self, status: int, connection: _Connection) -> None:
        self.status = status
        self._connection = connection
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: BrokenError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._raised: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether it came to its end and all of it was taken."""
        return self._ended and not self._pieces

    async def readany(self) -> bytes:
        """What is there, waiting for at least one byte; empty at the end. Raises BrokenError."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._more()
        return self._taken()

    async def flow(self, take: Callable[[bytes], bool]) -> bool:
        """Hand what comes to `take` at once, where it is read from the socket, without waking anybody; as many bytes in
        one call as there are. Returns True as soon as `take` does not want more for now, False at the end.

        Raises BrokenError, and what `take` raises.
        """
        while True:
            if self._pieces:
                if not take(self._taken()):
                    return True
            elif self._error is not None:
                raise self._error
            elif self._ended:
                return False
            else:
                self._take = take
                try:
                    await self._more()
                finally:
                    stopped, self._take = self._take is None, None
                    raised, self._raised = self._raised, None
                if raised is not None:
                    raise raised
                if stopped:
                    return True

    async def read(self, limit: int = -1) -> bytes:
        """All of it, or the first `limit` bytes. Raises BrokenError."""
        found: list[bytes] = []
        size = 0
        while (limit < 0 or size < limit) and (data := await self.readany()):
            found.append(data)
            size += len(data)
        whole = b"".join(found)
        return whole if limit < 0 else whole[:limit]

    def close(self) -> None:
        """Idempotent; without effect when it came to its end. Whoever waits for more hears BrokenError."""
        if not self._ended:
            self._pieces = []
            self.broke(BrokenError("closed here"))
            self._connection.close()

    def came(self, data: bytes) -> None:
        """So much of it came with one read."""
        take = self._take
        if take is not None:
            try:
                if take(data):
                    return
            except Exception as error:
                self._raised = error
            self._take = None
        else:
            self._pieces.append(data)
            self._size += len(data)
            if self._size > READ_BYTES:
                self._connection.pause_reading()
        self._wake()

    def complete(self) -> None:
        """That was all."""
        self._ended = True
        self._wake()

    def broke(self, error: BrokenError) -> None:
        """No more will come: what is there can be read yet."""
        if not self._ended and self._error is None:
            self._error = error
            self._wake()

    def _taken(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        self._connection.resume_reading()
        return data

    async def _more(self) -> None:
        """Wait for something to happen."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
        if connection is None:
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


class _Connection(asyncio.Protocol):
    """One connection, which serves one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: WorkerConnections, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.idle_since_s = 0.0
        self.should_close = False
        self._loop = loop
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        """The parser's: a piece of the body. They are handed on once a read is parsed, or with the answer's end."""
        self._parser = httptools.HttpResponseParser(self)
        self._head: asyncio.Future[Answer] | None = None
        self._head_bytes = 0
        self._answer: Answer | None = None
        self._interim = False
        self._paused = False
        self._writable: asyncio.Future[None] | None = None

    def is_connected(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, head: bytes, body: bytes) -> Answer:
        """Send a request; returns when the head of its answer is there. Raises BrokenError."""
        if not self.is_connected():
            raise BrokenError("closed by the other side")
        self._head_bytes = 0
        self._head = self._loop.create_future()
        await self._send(head, body)
        return await self._head

    def close(self) -> None:
        """Idempotent."""
        self.should_close = True
        if self._transport is not None:
            self._transport.close()
        self._fail(BrokenError("closed here"))
        self._pool.ended(self, reusable=False)

    def pause_reading(self) -> None:
        """Nothing more is wanted for now."""
        if self.is_connected() and not self._paused:
            self._paused = True
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        if self.is_connected() and self._paused:
            self._paused = False
            cast(asyncio.Transport, self._transport).resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._head is None and self._answer is None:  # nobody asked
            self.close()
            return
        if self._answer is None:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._hand_on()
            self._fail(BrokenError(repr(error)))
            self.close()
            return
        if self._pieces:
            self._hand_on()
        if self._answer is None and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(BrokenError(f"the head of an answer is over {MAX_HEAD_BYTES} bytes"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        self._fail(BrokenError("closed by the other side" if exc is None else repr(exc)))
        self._pool.ended(self, reusable=False)

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def on_message_begin(self) -> None:
        """The parser's: the first byte of an answer."""
        if self._head is None:  # a second answer to one request
            raise ValueError("nobody asked for it")

    def on_headers_complete(self) -> None:
        """The parser's: status and headers are there."""
        status, head = self._parser.get_status_code(), self._head
        self._interim = 100 <= status < 200
        if self._interim or head is None:
            return
        self._answer = answer = Answer(status, self)
        if not head.done():
            head.set_result(answer)

    def on_message_complete(self) -> None:
        """The parser's: the answer's end."""
        if self._interim or self._answer is None:
            return
        self._hand_on()
        answer, self._answer, self._head = self._answer, None, None
        self._head_bytes = 0
        answer.complete()
        if self.should_close or not self._parser.should_keep_alive() or not self.is_connected():
            self.close()
            return
        self.idle_since_s = self._loop.time()
        self._pool.ended(self, reusable=True)

    def _hand_on(self) -> None:
        pieces = self._pieces
        if pieces and self._answer is not None:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._answer.came(data)

    async def _send(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None, "checked by the caller"
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        for begin in range(0, len(body), PIECE_BYTES):
            if self._writable is not None:
                await self._writable
            if not self.is_connected():
                return  # an answer that came before may say why
            self._transport.write(body[begin : begin + PIECE_BYTES])
            await asyncio.sleep(0)

    def _fail(self, error: BrokenError) -> None:
        """Whoever waits for an answer, or for more of it, hears of it."""
        head, answer = self._head, self._answer
        self._head = self._answer = None
        if answer is not None:
            answer.broke(error)
        elif head is not None and not head.done():
            head.set_exception(error)
            head.exception()  # whoever asked may be gone
