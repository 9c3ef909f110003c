"""Block events from a worker to gateways: GET /v1/blocks answers with frames that never end.

A frame is a 4-byte big-endian length and one msgpack message. First `BlocksHello`; then, whenever the follower has to
start anew, a snapshot in one or more `BlocksSnapshot`s; then `BlocksChanged`, numbered without gaps, empty ones as a
sign of life. Keys (`kv.hashing`) are `KEY_BYTES` long, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farfill.core.errors import ProtocolError
from farfill.wire.stream import StreamReader, framed

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
    return framed(_encode(message))


def join_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as they travel."""
    return b"".join(keys)


def split_keys(joined: bytes) -> list[bytes]:
    """The keys again. Raises ProtocolError when they are cut."""
    if len(joined) % KEY_BYTES:
        raise ProtocolError(f"{len(joined)} bytes of block keys are no multiple of {KEY_BYTES}")
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


class BlocksReader(StreamReader[BlocksMessage]):
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        super().__init__(_decoder.decode, max_bytes=MAX_FRAME_BYTES, what="frame of block events")
