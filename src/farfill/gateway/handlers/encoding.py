"""Content-Encoding of request bodies: whole, of a known coding, and no larger than a body may be."""

from __future__ import annotations

import zlib
from collections.abc import Callable

from farfill.core.errors import InvalidRequestError

ENCODING_HEADER = "Content-Encoding"
_GZIP = zlib.MAX_WBITS | 16
_WBITS: dict[str, Callable[[bytes], int]] = {
    "gzip": lambda _: _GZIP,
    "x-gzip": lambda _: _GZIP,
    # Some send it without zlib's frame; the method is in the low bits of the frame's first byte.
    "deflate": lambda data: zlib.MAX_WBITS if data[0] & 0xF == zlib.DEFLATED else -zlib.MAX_WBITS,
}


class TooLargeError(Exception):
    """The body is larger than it may be, when decoded."""


def decoded(data: bytes, encoding: str, limit: int) -> bytes:
    """`data` without `encoding`, the header's value: any number of codings, in the order they were applied.

    Raises InvalidRequestError for a coding that is not known here, and for data that is not whole; TooLargeError
    over `limit` bytes, without having made many more.
    """
    codings = [name.strip().lower() for name in encoding.split(",")]
    codings = [name for name in codings if name not in ("", "identity")]
    unknown = [name for name in codings if name not in _WBITS]
    if unknown or len(codings) > 1:
        raise InvalidRequestError(
            f"{ENCODING_HEADER} {encoding[:100]!r} is not understood here; use one of gzip and deflate, or none",
            param=ENCODING_HEADER,
            reason="unsupported",
        )
    if not data or not codings:
        return data
    return _inflated(data, _WBITS[codings[0]](data), limit)


def _inflated(data: bytes, wbits: int, limit: int) -> bytes:
    parts: list[bytes] = []
    room = limit
    while data:  # one member of gzip after another
        stream = zlib.decompressobj(wbits)
        try:
            parts.append(stream.decompress(data, room + 1))
        except zlib.error as error:
            raise _undecodable() from error
        room -= len(parts[-1])
        if room < 0:
            raise TooLargeError
        if not stream.eof or (stream.unused_data and wbits != _GZIP):
            raise _undecodable()
        data = stream.unused_data
    return b"".join(parts)


def _undecodable() -> InvalidRequestError:
    return InvalidRequestError(
        f"the body cannot be decoded as its {ENCODING_HEADER} says, or is not whole", param=ENCODING_HEADER
    )
