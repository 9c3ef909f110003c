"""Serves the application; what aiohttp refuses before any handler sees it gets OpenAI's error shape too."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import InvalidURLError
from aiohttp.typedefs import Middleware

from farfill.core.errors import InvalidRequestError
from farfill.gateway.answer import Answer
from farfill.gateway.errors import error_response
from farfill.gateway.handlers.request_id import HEADER, tell_request_id

log = structlog.get_logger("farfill.gateway")


IDLE_S = 75.0
"""A connection is closed after so long without a whole request head: idle ones, and those that never end one."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DIRECT = web.AppKey("direct", dict[str, Handler])
"""What is POSTed to these paths goes to these handlers, past router and signals: see `direct`."""


def direct(handler: Handler, middlewares: Sequence[Middleware]) -> Handler:
    """`handler` behind `middlewares`, the first one outermost, as the application would call it."""
    for middleware in reversed(middlewares):
        handler = partial(middleware, handler=handler)
    return handler


class GatewayRunner(web.AppRunner):
    """An `AppRunner` with handler cancellation, whose connections tell malformed HTTP as `_Connection` does."""

    def __init__(self, app: web.Application, *, shutdown_timeout_s: float) -> None:
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            _shortened(self.app.get(DIRECT, {}), cast(Handler, made.request_handler)),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
        )


def _shortened(paths: Mapping[str, Handler], application: Handler) -> Callable[[web.BaseRequest], Awaitable]:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.Request)
        found = paths.get(request.path) if request.method == "POST" else None
        if found is None or "Expect" in request.headers:
            try:
                return await application(request)
            except web.HTTPExpectationFailed:  # before any middleware
                expected = request.headers["Expect"]
                text = f"Expect: {expected} is not understood here; only 100-continue is"
                error = InvalidRequestError(text, reason="expectation_failed")
                response = error_response(error, {HEADER: uuid.uuid4().hex})
                response.force_close()  # the body may come, or not
                return response
        response = await found(request)
        if not isinstance(response, Answer):  # no signal will do it
            await tell_request_id(request, response)
        return response

    return handle


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        loop = asyncio.get_running_loop()
        return _Connection(
            self,
            loop=loop,
            access_log=None,  # pyright: ignore[reportArgumentType] -- None: no log
            keepalive_timeout=IDLE_S,
            auto_decompress=False,  # aiohttp takes half a body of gzip for a whole one; `read_body` does not
        )


class _Connection(web.RequestHandler):
    """One client's connection."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A client's malformed HTTP is an answer, not an error in our log. The connection ends with it."""
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        error, request_id = _client_fault(exc, message or ""), uuid.uuid4().hex
        log.info("malformed_request", request_id=request_id, remote=request.remote, error=str(error))
        response = error_response(error, {HEADER: request_id})
        response.force_close()
        return response


def _client_fault(exc: BaseException | None, message: str) -> InvalidRequestError:
    if isinstance(exc, InvalidURLError):
        return InvalidRequestError("the request's target is not a path", reason="bad_request")
    # Only the first line: what follows repeats the client's bytes.
    told = message.strip().splitlines()[:1]
    return InvalidRequestError(told[0].rstrip(": ") if told else "malformed HTTP request", reason="bad_request")
