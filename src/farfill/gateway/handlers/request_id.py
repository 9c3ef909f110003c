"""Request ids: taken from `X-Request-Id` or the body, generated when absent, told in every answer."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from farfill.core.errors import InvalidRequestError
from farfill.gateway.errors import error_response

HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@web.middleware
async def with_request_id(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give every request an id; refuse one that could break logs or paths."""
    given = request.headers.get(HEADER)
    request[REQUEST_ID] = given if given and _VALID.fullmatch(given) else secrets.token_hex(16)
    if given is not None and request[REQUEST_ID] != given:
        return error_response(_invalid(HEADER))
    return await handler(request)


async def tell_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """on_response_prepare: the id goes out with every answer."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[HEADER] = request_id


def adopt_request_id(request: web.Request, from_body: str | None) -> str:
    """The request's id; the body's when the header gave none."""
    if from_body is not None and HEADER not in request.headers:
        if not _VALID.fullmatch(from_body):
            raise _invalid("request_id")
        request[REQUEST_ID] = from_body
    return request[REQUEST_ID]


def _invalid(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} must be 1 to 128 letters, digits or ._:- and start with a letter or digit", param=param
    )
