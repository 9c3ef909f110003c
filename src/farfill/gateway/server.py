"""Serves the application; what aiohttp refuses before any handler sees it gets OpenAI's error shape too."""

from __future__ import annotations

import asyncio
import uuid

import structlog
from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from farfill.core.errors import InvalidRequestError
from farfill.gateway.errors import error_response
from farfill.gateway.handlers.body import undecodable_body
from farfill.gateway.handlers.request_id import HEADER

log = structlog.get_logger("farfill.gateway")


class GatewayRunner(web.AppRunner):
    """An `AppRunner` with handler cancellation, whose connections tell malformed HTTP as `_Connection` does."""

    def __init__(self, app: web.Application, *, shutdown_timeout_s: float) -> None:
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=asyncio.get_running_loop(),
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        loop = asyncio.get_running_loop()
        return _Connection(self, loop=loop, access_log=None)  # pyright: ignore[reportArgumentType] -- None: no log


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
    if isinstance(exc, ContentEncodingError):
        return undecodable_body()
    # Only the first line: what follows repeats the client's bytes.
    told = message.strip().splitlines()[:1]
    return InvalidRequestError(told[0].rstrip(": ") if told else "malformed HTTP request", reason="bad_request")
