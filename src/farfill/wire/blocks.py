"""Block events from a worker to gateways: GET /v1/blocks answers with frames that never end.

A frame is a 4-byte big-endian length and one msgpack message. First `BlocksHello`; then, whenever the follower has to
start anew, a snapshot in one or more `BlocksSnapshot`s; then `BlocksChanged`, numbered without gaps, empty ones as a
sign of life. Keys (`kv.hashing`) are `KEY_BYTES` long, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from farfill.core.errors import ProtocolError

BLOCKS_PATH = "/v1/blocks"
KEY_BYTES = 16
BEAT_S = 2.0
"""A follower hears at least this often."""
MAX_FRAME_BYTES = 4 * 1024 * 1024
KEYS_PER_FRAME = 65_536


class BlocksHello(msgspec.Struct, tag="hello", kw_only=True):
    """How keys are to be read: see `engine.blocks.BlockLedger`."""

    generation: str
    chunk_tokens: int
    sparse: bool


class BlocksSnapshot(msgspec.Struct, tag="snapshot", kw_only=True):
    """All blocks as of change `seq`: from `first` on anything known before is void, with `last` it is complete."""

    seq: int
    first: bool
    last: bool
    keys: bytes


class BlocksChanged(msgspec.Struct, tag="changed", kw_only=True):
    """(kind, keys) of consecutive changes; the first one's number is `first`. Kinds: stored, removed, cleared."""

    first: int
    changes: list[tuple[str, bytes]]


BlocksMessage = BlocksHello | BlocksSnapshot | BlocksChanged

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(BlocksMessage)


def encode_blocks(message: BlocksMessage) -> bytes:
    """One frame."""
    body = _encode(message)
    return len(body).to_bytes(4, "big") + body


def join_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as they travel."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[bytes]:
    """The keys again. Raises ProtocolError when they are cut."""
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"{len(joined)} bytes of block keys are no multiple of {KEY_BYTES}")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


class BlocksReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[BlocksMessage]:
        """Yield each complete message. Raises ProtocolError on an oversized or malformed frame."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                yield _decoder.decode(body)
            except msgspec.DecodeError as error:
                raise ProtocolError(f"malformed frame of block events: {error}") from error
