"""Frames of a generation stream: 4-byte big-endian length, then one msgpack `GenerationEvent`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from farfill.core.errors import ProtocolError
from farfill.wire.control import GenerationEvent

MAX_EVENT_BYTES = 16 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GenerationEvent)


def encode_event(event: GenerationEvent) -> bytes:
    """One frame."""
    body = _encoder.encode(event)
    return len(body).to_bytes(4, "big") + body


class EventReader:
    """Cuts a byte stream into events. Feed bytes as they come; `at_boundary` tells a cut stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def at_boundary(self) -> bool:
        """Whether no half frame is pending."""
        return not self._buffer

    def feed(self, data: bytes) -> Iterator[GenerationEvent]:
        """Yield each complete event. Raises ProtocolError on an oversized or malformed frame."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > MAX_EVENT_BYTES:
                raise ProtocolError(f"event frame of {length} bytes is over the limit of {MAX_EVENT_BYTES}")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                yield _decoder.decode(body)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"malformed event frame: {error}") from error
