"""msgpack over HTTP as workers speak it: bodies in, bodies out, errors with a reason and the right status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import structlog
from aiohttp import web

from farfill.core.errors import (
    CapacityError,
    FarfillError,
    IncompatiblePeerError,
    InvalidRequestError,
    TicketError,
    UnavailableError,
)
from farfill.transport.tls import PeerIdentity, peer_identity
from farfill.wire.control import CONTENT_TYPE, PROTOCOL_VERSION, VERSION_HEADER, ErrorBody

log = structlog.get_logger()

_encode = msgspec.msgpack.Encoder().encode
Message = TypeVar("Message", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def read_message(request: web.Request, kind: type[Message]) -> Message:
    """The request body as `kind`. Raises InvalidRequestError naming what is wrong."""
    try:
        return msgspec.msgpack.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not a {kind.__name__}: {error}") from error


def log_as(request_id: str) -> None:
    """Every line this request leads to, here and in what it starts, carries the gateway's id of it."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def message_response(message: msgspec.Struct, status: int = 200) -> web.Response:
    """`message` as a msgpack answer."""
    return web.Response(body=_encode(message), status=status, content_type=CONTENT_TYPE)


def status_of(error: FarfillError) -> int:
    """400: its fault. 403: not allowed. 409: not our kind. 503: elsewhere or later. 500: ours."""
    if isinstance(error, InvalidRequestError):
        return 400
    if isinstance(error, TicketError):
        return 403
    if isinstance(error, IncompatiblePeerError):
        return 409
    return 503 if isinstance(error, CapacityError | UnavailableError) or error.retryable else 500


def error_response(error: FarfillError) -> web.Response:
    """`error` as a msgpack answer with its `status_of`."""
    status = status_of(error)
    retry_after_s = float(getattr(error, "retry_after_s", 0.0))
    body = ErrorBody(
        reason=error.reason,
        message=str(error),
        retryable=error.retryable,
        side=error.side,
        retry_after_s=retry_after_s,
    )
    response = message_response(body, status)
    if status == 503:
        response.headers["Retry-After"] = str(max(1, round(retry_after_s)))
    return response


def guard(handler: Handler, *, cluster: str, roles: frozenset[str]) -> Handler:
    """Let only certificates of `cluster` with one of `roles`, speaking our protocol version, reach `handler`.

    Without TLS there is no identity: workers only ever listen with mutual TLS.
    """

    async def guarded(request: web.Request) -> web.StreamResponse:
        structlog.contextvars.clear_contextvars()  # of whoever used this connection before
        try:
            identity = identity_of(request)
            if identity is None or identity.cluster != cluster or identity.role not in roles:
                log.warning("request_refused", reason="forbidden", path=request.path, peer=str(identity))
                body = ErrorBody(reason="forbidden", message=f"{identity} may not call {request.path}")
                return message_response(body, 403)
            version = request.headers.get(VERSION_HEADER, "")
            if version != str(PROTOCOL_VERSION):
                log.warning("request_refused", reason="protocol_version", path=request.path, peer=str(identity))
                text = f"{VERSION_HEADER} is {version or 'missing'}, this worker speaks version {PROTOCOL_VERSION}"
                return message_response(ErrorBody(reason="protocol_version", message=text), 426)
            return await handler(request)
        except FarfillError as error:
            log.warning("request_failed", path=request.path, reason=error.reason, error=str(error))
            return error_response(error)

    return guarded


def identity_of(request: web.Request) -> PeerIdentity | None:
    """Who presented the client certificate of this connection."""
    transport = request.transport
    ssl_object = None if transport is None else transport.get_extra_info("ssl_object")
    return None if ssl_object is None else peer_identity(ssl_object)
