"""Frames of a generation stream: 4-byte big-endian length, then one msgpack `GenerationEvent`."""

from __future__ import annotations

import msgspec

from farfill.wire.control import GenerationEvent
from farfill.wire.stream import StreamReader, framed

MAX_EVENT_BYTES = 16 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GenerationEvent)


def encode_event(event: GenerationEvent) -> bytes:
    """One frame."""
    return framed(_encoder.encode(event))


class EventReader(StreamReader[GenerationEvent]):
    """Cuts a byte stream into events."""

    def __init__(self) -> None:
        super().__init__(_decoder.decode, max_bytes=MAX_EVENT_BYTES, what="event frame")
