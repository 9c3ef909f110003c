"""Reads request bodies; one that cannot be decoded, or does not come, is the client's fault, not ours."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from farfill.core.errors import InvalidRequestError
from farfill.gateway.handlers.encoding import ENCODING_HEADER, TooLargeError, decoded

GRACE_S = 30.0
SLOWEST_BYTES_PER_S = 64 * 1024
"""A body has `GRACE_S`, and as long as it takes at this rate: clients that dribble hold nothing for longer."""


async def read_body(request: web.Request) -> bytes:
    """The whole body, decompressed here: served connections leave it as it came (`auto_decompress` is off).

    Raises InvalidRequestError when it does not come, or not as its headers say.
    """
    try:
        data = await (request.read() if request.content.is_eof() else _slowly(request))
    except (web.RequestPayloadError, HttpProcessingError) as error:
        # Nothing after the fault can be understood.
        _end(request)
        raise InvalidRequestError("the body broke off or is not framed as its headers say") from error
    return await _decoded(request, data) if ENCODING_HEADER in request.headers else data


async def _decoded(request: web.Request, data: bytes) -> bytes:
    limit = request.client_max_size
    encoding = ", ".join(request.headers.getall(ENCODING_HEADER))
    try:
        # On a thread: megabytes can come of few bytes.
        return await asyncio.to_thread(decoded, data, encoding, limit)
    except TooLargeError:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=limit + 1) from None


async def _slowly(request: web.Request) -> bytes:
    """A body that was not there with its head."""
    size = request.content_length
    limit_s = GRACE_S + (request.client_max_size if size is None else size) / SLOWEST_BYTES_PER_S
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await request.read()
    except TimeoutError:
        if not limit.expired():  # somebody else's
            raise
        _end(request)
        raise InvalidRequestError(f"the body did not come within {limit_s:.0f} s", reason="body_too_slow") from None


def _end(request: web.Request) -> None:
    """End the body, so that nobody waits for the rest of it, and with its answer the connection."""
    request.content.feed_eof()
    if request.protocol is not None:
        request.protocol.close()
