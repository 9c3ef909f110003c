"""HTTP status and OpenAI error shape of every failure; the only place that maps errors to statuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from math import ceil

import msgspec
import structlog
from aiohttp import web

from farfill.core.errors import CapacityError, FarfillError, InvalidRequestError, TransferError, UnavailableError

log = structlog.get_logger("farfill.gateway")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_INVALID_STATUS = {
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_slow": 408,
    "body_too_large": 413,
    "expectation_failed": 417,
}


class OverloadedError(CapacityError):
    """This gateway already has as many requests in progress as it may; nothing is wrong with the workers."""

    reason = "rate_limit_exceeded"
    side = "gateway"


class DeadlineError(FarfillError):
    """The request ran longer than `gateway.request_timeout_s`."""

    reason = "request_timeout"
    retryable = True


class StoppingError(UnavailableError):
    """This gateway stops, and may not wait for the request's end."""

    reason = "gateway_stopping"
    side = "gateway"


class PoisonousRequestError(FarfillError):
    """So many instances died while they worked on this request that no other one gets it. Not to be sent again."""

    reason = "request_kills_workers"
    retryable = False


class UnauthorisedError(FarfillError):
    """Nobody we know. The client hears little; `cause` is for metrics and logs."""

    reason = "invalid_api_key"
    side = "client"

    def __init__(self, message: str = "incorrect API key provided", *, cause: str, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.cause = cause


class ForbiddenError(FarfillError):
    """Somebody we know, who may not do this, or not from there."""

    reason = "forbidden"
    side = "client"

    def __init__(self, message: str, *, cause: str, reason: str | None = None) -> None:
        super().__init__(message, reason=reason)
        self.cause = cause


class KeysUnavailableError(UnavailableError):
    """Whether the credential is good cannot be told now."""

    reason = "keys_unavailable"


MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200
"""Of an error: it names what the client sent, which may be a book."""

_STATUS = ((UnauthorisedError, 401), (ForbiddenError, 403), (OverloadedError, 429), (DeadlineError, 504))


class ErrorDetail(msgspec.Struct, kw_only=True):
    """OpenAI's error object; `code` is the stable reason."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(msgspec.Struct):
    """Body of every error answer and of the error event of a broken stream."""

    error: ErrorDetail


def http_status(error: FarfillError) -> int:
    """400-range: the client's to fix; 429/503: try again later; 5xx: ours."""
    if isinstance(error, InvalidRequestError):
        return _INVALID_STATUS.get(error.reason, 400)
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    if isinstance(error, CapacityError | UnavailableError | TransferError) or error.retryable:
        return 503
    return 500


def envelope(error: FarfillError) -> ErrorEnvelope:
    """`error` in OpenAI's shape."""
    status = http_status(error)
    if status == 429:
        kind = "rate_limit_error"
    elif status == 403:
        kind = "permission_error"
    elif status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    param = error.param if isinstance(error, InvalidRequestError) else None
    message = _shortened(str(error), MAX_MESSAGE_CHARS)
    param = None if param is None else _shortened(param, MAX_PARAM_CHARS)
    return ErrorEnvelope(ErrorDetail(message=message, type=kind, param=param, code=error.reason))


def _shortened(text: str, limit: int) -> str:
    """Without its middle: what was sent comes first, what to do about it last."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[3 - limit // 2 :]}"


def error_response(error: FarfillError, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer for `error`, with `Retry-After` where trying again helps."""
    status = http_status(error)
    response = web.Response(
        body=msgspec.json.encode(envelope(error)), status=status, content_type="application/json", headers=headers
    )
    if isinstance(error, PoisonousRequestError):
        response.headers["x-should-retry"] = "false"  # OpenAI's clients send a 500 again otherwise
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, CapacityError | UnavailableError) else 1.0
        response.headers["Retry-After"] = str(max(1, ceil(retry_after_s)))
    return response


def internal_error(error: Exception) -> FarfillError:
    """What the client hears of a bug: nothing of its insides."""
    log.error("internal_error", error=repr(error), exc_info=error)
    return FarfillError("internal error of the gateway")


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler or the router raises into OpenAI's error shape."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _router_error(request, error)
    except FarfillError as error:
        return error_response(error)
    except Exception as error:
        return error_response(internal_error(error))


def _router_error(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        text = f"{request.method} is not allowed for {request.path}; allowed: {allowed}"
        return error_response(InvalidRequestError(text, reason="method_not_allowed"), {"Allow": allowed})
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.client_max_size
        text = f"the body is larger than {limit} bytes (gateway.max_body_mb: {limit >> 20})"
        return error_response(InvalidRequestError(text, reason="body_too_large"))
    if error.status == 404:
        return error_response(InvalidRequestError(f"unknown path {request.path}", reason="not_found"))
    if error.status < 500:
        phrase = HTTPStatus(error.status).phrase.lower()
        return error_response(InvalidRequestError(error.text or phrase, reason=phrase.replace(" ", "_")))
    return error_response(internal_error(error))
