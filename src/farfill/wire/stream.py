"""Messages in a byte stream: each a 4-byte big-endian length and so many bytes. Event streams of workers are such."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from farfill.core.errors import ProtocolError

Message = TypeVar("Message")
_LENGTH_BYTES = 4


def framed(body: bytes) -> bytes:
    """One message as it travels."""
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class StreamReader(Generic[Message]):
    """Cuts a byte stream into messages. Feed bytes as they come; `at_boundary` tells a cut stream."""

    def __init__(self, decode: Callable[[bytes], Message], *, max_bytes: int, what: str) -> None:
        self._decode = decode
        self._max_bytes = max_bytes
        self._what = what
        self._buffer = bytearray()

    @property
    def at_boundary(self) -> bool:
        """Whether no half message is pending."""
        return not self._buffer

    def take(self, data: bytes) -> list[Message]:
        """All messages that `data` completes. Raises ProtocolError as `feed` does, and then tells none of them."""
        if self._buffer:
            return list(self.feed(data))
        found, begin, size = list[Message](), _LENGTH_BYTES, len(data)  # mostly whole messages: nothing to keep
        while begin <= size:
            end = begin + int.from_bytes(data[begin - _LENGTH_BYTES : begin], "big")
            if end > size or end - begin > self._max_bytes:
                break
            try:
                found.append(self._decode(data[begin:end]))
            except msgspec.DecodeError as error:
                raise self._malformed(error) from error
            begin = end + _LENGTH_BYTES
        if begin - _LENGTH_BYTES < size:
            found += self.feed(data[begin - _LENGTH_BYTES :])
        return found

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield each complete message. Raises ProtocolError on an oversized or malformed one."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if length > self._max_bytes:
                raise ProtocolError(f"{self._what} of {length} bytes is over the limit of {self._max_bytes}")
            end = _LENGTH_BYTES + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            try:
                yield self._decode(body)
            except msgspec.DecodeError as error:
                raise self._malformed(error) from error

    def _malformed(self, error: msgspec.DecodeError) -> ProtocolError:
        return ProtocolError(f"malformed {self._what}: {error}")
