"""A link measurement where only the near side may open connections: it dials control and KV, the bytes go as always.

The far side measures and lets in; what it would ask the near side goes over a WebSocket that the near side opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
import msgspec
import structlog
from aiohttp import web

from farfill.config.checks import split_address
from farfill.core.errors import FarfillError
from farfill.transport.tls import http_server_context, peer_identity
from farfill.verify.link import (
    CALL_DEADLINE_S,
    Ends,
    LinkOffer,
    LinkTestError,
    NearSide,
    TicketOffer,
    checked_context,
    checked_offer,
)
from farfill.verify.link_serve import LinkServer

PATH = "/v1/link/near"
REDIAL_S = 1.0

log = structlog.get_logger(__name__)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """From far to near. `ask`: "offer", "ticket" (of `num_tokens`, over `connections`) or "ping"."""

    number: int
    ask: str
    num_tokens: int = 0
    connections: int = 0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """From near to far: JSON of what was asked for, or why not."""

    number: int
    body: str = ""
    error: str = ""


class _LetInNearSide:
    """A near side that dialled."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.gone = asyncio.Event()

    async def offer(self) -> LinkOffer:
        return checked_offer(await self._ask(Question(number=next(self._numbers), ask="offer")))

    async def ticket(self, num_tokens: int, connections: int) -> TicketOffer:
        question = Question(
            number=next(self._numbers), ask="ticket", num_tokens=num_tokens, connections=connections
        )  # fmt: skip
        return msgspec.json.decode(await self._ask(question), type=TicketOffer)

    async def ping(self) -> float:
        start_s = time.monotonic()
        await self._ask(Question(number=next(self._numbers), ask="ping"))
        return time.monotonic() - start_s

    async def listen(self) -> None:
        """Take replies until the near side goes away."""
        try:
            async for message in self._socket:
                reply = msgspec.json.decode(message.data, type=Reply)
                waiting = self._waiting.get(reply.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        finally:
            self.gone.set()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(LinkTestError("the near side went away"))

    async def _ask(self, question: Question) -> bytes:
        if self.gone.is_set():
            raise LinkTestError("the near side went away")
        waiting = self._waiting[question.number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(CALL_DEADLINE_S):
                await self._socket.send_bytes(msgspec.json.encode(question))
                reply = await waiting
        except (ConnectionError, TimeoutError) as error:
            raise LinkTestError(f"the near side does not answer: {error or 'no answer in time'}") from error
        finally:
            del self._waiting[question.number]
        if reply.error:
            raise LinkTestError(f"the near side: {reply.error}")
        return reply.body.encode()


@contextlib.asynccontextmanager
async def let_in_near_side(ends: Ends, listen: str, report: Callable[[str], None]) -> AsyncIterator[NearSide]:
    """At the far side: listen at `listen` until `ends.target` has dialled. Raises LinkTestError when it cannot."""
    arrived: asyncio.Future[_LetInNearSide] = asyncio.get_running_loop().create_future()

    async def welcome(request: web.Request) -> web.StreamResponse:
        tls = None if request.transport is None else request.transport.get_extra_info("ssl_object")
        who = None if tls is None else peer_identity(tls)
        if who is None or (who.cluster, who.name) != (ends.cluster, ends.target):
            log.warning("request_refused", reason="forbidden", peer=str(who))
            return web.Response(status=403, text=f"{ends.target} of {ends.cluster} is waited for")
        if arrived.done():
            return web.Response(status=409, text="a measurement is under way")
        socket = web.WebSocketResponse(heartbeat=CALL_DEADLINE_S)
        await socket.prepare(request)
        near = _LetInNearSide(socket)
        arrived.set_result(near)
        await near.listen()
        return socket

    app = web.Application()
    app.router.add_get(PATH, welcome)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        host, port = split_address(listen)
        try:
            await web.TCPSite(runner, host, port, ssl_context=http_server_context(*ends.pems)).start()
        except OSError as error:
            raise LinkTestError(f"cannot listen at {listen}: {os.strerror(error.errno or 0)}") from error
        report(f"waiting for {ends.target} to dial")
        yield await arrived
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class FarSide:
    """Whom the near side dials: the prefill worker `name`, its control at `control`, its KV at `transfer`."""

    cluster: str
    name: str
    control: str
    transfer: str


async def dial_far_side(server: LinkServer, far: FarSide, pems: tuple[bytes, bytes, bytes]) -> None:
    """At the near side: answer one measurement after the other, dialling again in between, until cancelled."""
    connector = aiohttp.TCPConnector(ssl=checked_context(pems, far.cluster, far.name))
    complained = ""
    async with aiohttp.ClientSession(connector=connector) as session:
        while True:
            try:
                async with session.ws_connect(f"https://{far.control}{PATH}", heartbeat=CALL_DEADLINE_S) as socket:
                    log.info("link_dialled", far=far.name, address=far.control)
                    complained = ""
                    async for message in socket:
                        question = msgspec.json.decode(message.data, type=Question)
                        await socket.send_bytes(msgspec.json.encode(await _answer(server, far, question)))
            except (aiohttp.ClientError, OSError) as error:
                if str(error) != complained:
                    complained = str(error)
                    log.warning("link_far_side_away", address=far.control, error=str(error))
            await asyncio.sleep(REDIAL_S)


async def _answer(server: LinkServer, far: FarSide, question: Question) -> Reply:
    body = b""
    try:
        if question.ask == "offer":
            body = msgspec.json.encode(server.offer())
        elif question.ask == "ticket":
            await server.use_connections(question.connections)
            body = msgspec.json.encode(server.expect(far.name, question.num_tokens, far.transfer))
        elif question.ask != "ping":
            return Reply(number=question.number, error=f"no answer to {question.ask!r}")
    except FarfillError as error:
        return Reply(number=question.number, error=str(error))
    return Reply(number=question.number, body=body.decode())
