"""Reads request bodies; one that cannot be decoded is the client's fault, not ours."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from farfill.core.errors import InvalidRequestError

ENCODING_HEADER = "Content-Encoding"


async def read_body(request: web.Request) -> bytes:
    """The whole body, decompressed. Raises InvalidRequestError when it is not what its headers say."""
    try:
        return await request.read()
    except (web.RequestPayloadError, HttpProcessingError) as error:
        # Nothing after the fault can be understood: end the body, so that nobody waits for the rest of it, and
        # with this answer the connection.
        request.content.feed_eof()
        if request.protocol is not None:
            request.protocol.close()
        if ENCODING_HEADER in request.headers:
            raise undecodable_body() from error
        raise InvalidRequestError("the body broke off or is not framed as its headers say") from error


def undecodable_body() -> InvalidRequestError:
    """The body is not compressed as its header says."""
    return InvalidRequestError(f"the body cannot be decoded as its {ENCODING_HEADER} says", param=ENCODING_HEADER)
