"""KV frames: what travels on a data connection between two workers. Pure: parsing and packing, no sockets.

Every frame is a fixed 64-byte big-endian header and `wire_bytes` of payload. Magic and version keep their
place in every version, so a peer of another version can still be told why it is refused. Control payloads
are bounded msgpack structs; a CHUNK's payload is encoded cache bytes. Nothing here is used to build memory:
the receiver derives its own manifest and checks piece, offset and length against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from struct import Struct
from typing import Annotated, TypeVar

import msgspec

from farfill.core.errors import IncompatiblePeerError, ProtocolError
from farfill.core.layout import KVLayout

FRAME_VERSION = 1
HEADER_BYTES = 64
MAX_CONTROL_BYTES = 1024 * 1024
MAX_CHUNK_BYTES = 256 * 1024 * 1024
MIN_CHUNK_BYTES = 64 * 1024
NO_TRANSFER = bytes(16)
NO_CHECKSUM = bytes(16)
FLAG_CHECKSUM = 0x01
ANSWERS_OPEN = 1
FLAG_EARLY = 0x02  # sent before the sender saw ACCEPT, within what the receiver granted
MAX_CODEC = 4

_MAGIC = b"FARF"
_HEADER = Struct(">4sBBBB16sIQII16sI")
assert _HEADER.size == HEADER_BYTES


class FrameType(IntEnum):
    """What a frame says. Numbers are the wire format and never change meaning."""

    HELLO = 1  # dialler's first frame
    WELCOME = 2  # the answer that lets transfers pass
    REFUSE = 3  # the answer that ends the connection
    OPEN = 4  # sender: here is a ticket and my layout
    ACCEPT = 5  # receiver: chunk size to use, chunks already held
    CHUNK = 6
    ACK = 7  # this chunk is verified and in place
    NACK = 8  # this chunk must be sent again
    KEEPALIVE = 9  # sender: prefill is alive though no bytes flow
    FINISH = 10  # sender: every piece was offered and sent
    COMPLETE = 11  # receiver: the whole set is verified; `attempt` ANSWERS_OPEN: said instead of ACCEPT
    FAIL = 12  # either side: this transfer is over, with the reason
    PING = 13
    PONG = 14
    RESUME = 15  # sender: a connection broke, which chunks do you hold? ACCEPT answers
    CREDIT = 16  # receiver: at most `offset` bytes of yours may be unacknowledged; a payload is an `EarlyGrant`
    CONNECTIONS = 17  # sender: `offset` connections are what this path needs; for a receiver that dials


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """`offset` counts in the piece; `checksum` is XXH3-128 of the raw bytes; `attempt` counts from 0."""

    type: FrameType
    transfer: bytes = NO_TRANSFER
    piece: int = 0
    offset: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    codec: int = 0
    flags: int = 0
    checksum: bytes = NO_CHECKSUM
    attempt: int = 0

    def pack(self) -> bytes:
        """The 64 bytes."""
        return pack_header(self)


def pack_header(header: FrameHeader, *, version: int = FRAME_VERSION) -> bytes:
    """The 64 bytes of `header`."""
    return _HEADER.pack(
        _MAGIC,
        version,
        header.type,
        header.codec,
        header.flags,
        header.transfer,
        header.piece,
        header.offset,
        header.raw_bytes,
        header.wire_bytes,
        header.checksum,
        header.attempt,
    )


def unpack_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Parse and bound 64 bytes.

    Raises ProtocolError for anything that is no Farfill frame or is over a bound, IncompatiblePeerError
    (reason protocol_version) for a frame of another version.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}", reason="bad_frame")
    magic, version, kind, codec, flags, transfer, piece, offset, raw, wire, checksum, attempt = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("bytes that are no Farfill frame", reason="bad_frame")
    if version != FRAME_VERSION:
        raise IncompatiblePeerError(f"frame version {version} there, {FRAME_VERSION} here", reason="protocol_version")
    try:
        frame_type = FrameType(kind)
    except ValueError:
        raise ProtocolError(f"unknown frame type {kind}", reason="bad_frame") from None
    if flags & ~(FLAG_CHECKSUM | FLAG_EARLY):
        raise ProtocolError(f"unknown frame flags {flags:#x}", reason="bad_frame")
    if frame_type is FrameType.CHUNK:
        if codec > MAX_CODEC:
            raise ProtocolError(f"unknown codec {codec}", reason="bad_frame")
        if not 0 < raw <= MAX_CHUNK_BYTES or not 0 < wire <= raw or (codec == 0 and wire != raw):
            raise ProtocolError(f"a chunk of {raw} raw and {wire} wire bytes is out of bounds", reason="oversize")
    elif wire > MAX_CONTROL_BYTES:
        raise ProtocolError(f"a {frame_type.name} payload of {wire} bytes is over the limit", reason="oversize")
    return FrameHeader(frame_type, transfer, piece, offset, raw, wire, codec, flags, checksum, attempt)


def transfer_key(transfer_id: str) -> bytes:
    """The 16 bytes that stand for a transfer id in frames."""
    return blake2b(transfer_id.encode(), digest_size=16, person=b"farfill-xfer-1").digest()


_ShortText = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=2048)]


class HelloPayload(msgspec.Struct, array_like=True, frozen=True):
    """HELLO and WELCOME: who speaks. `generation` changes at every start of the process."""

    protocol_version: int
    fingerprint: _ShortText
    instance: _ShortText
    generation: _ShortText


class ReasonPayload(msgspec.Struct, array_like=True, frozen=True):
    """REFUSE, NACK and FAIL: a stable reason and words for a person."""

    reason: _ShortText
    detail: _Text = ""


class TensorPayload(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of the sender's layout, for comparison only."""

    layer: int
    name: _ShortText
    kind: _ShortText
    dtype: _ShortText
    row_shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=8)]
    window_tokens: int
    row_tokens: int = 1


class OpenPayload(msgspec.Struct, array_like=True, frozen=True):
    """OPEN: permission, and the sender's idea of the set. `chunk_bytes` is its proposal for the cut.

    `lossy` names the form rows travel in, `kv_transfer.lossy`.
    """

    token: Annotated[str, msgspec.Meta(max_length=8192)]
    digest: Annotated[bytes, msgspec.Meta(max_length=64)]
    num_tokens: int
    layout_version: int
    prefill_chunk_tokens: int
    chunk_bytes: int
    tensors: Annotated[tuple[TensorPayload, ...], msgspec.Meta(max_length=16384)]
    lossy: _ShortText = "none"


class AcceptPayload(msgspec.Struct, array_like=True, frozen=True):
    """ACCEPT: the cut in force and a little-endian bitmap of chunks that need not come."""

    chunk_bytes: int
    held: bytes


class EarlyGrant(msgspec.Struct, array_like=True, frozen=True):
    """CREDIT: chunks of up to `chunk_bytes`, `early_bytes` of them at a time, may come before their ACCEPT is seen."""

    early_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    chunk_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


Payload = HelloPayload | ReasonPayload | OpenPayload | AcceptPayload | EarlyGrant
_PayloadT = TypeVar("_PayloadT", HelloPayload, ReasonPayload, OpenPayload, AcceptPayload, EarlyGrant)

_encoder = msgspec.msgpack.Encoder()


def encode_frame(header: FrameHeader, payload: Payload | None = None) -> bytes:
    """A whole control frame; `wire_bytes` is filled in. Raises ProtocolError when the payload is over the limit."""
    body = b"" if payload is None else _encoder.encode(payload)
    if len(body) > MAX_CONTROL_BYTES:
        raise ProtocolError(f"a {header.type.name} payload of {len(body)} bytes is over the limit", reason="oversize")
    return replace(header, wire_bytes=len(body)).pack() + body


def decode_payload(kind: type[_PayloadT], body: bytes | bytearray | memoryview) -> _PayloadT:
    """A bounded control payload. Raises ProtocolError when it is malformed."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {kind.__name__}: {error}", reason="bad_frame") from error


def layout_payload(layout: KVLayout) -> tuple[TensorPayload, ...]:
    """`layout.tensors` as sent in OPEN."""
    return tuple(
        TensorPayload(t.layer, t.name, str(t.kind), t.dtype, t.row_shape, t.window_tokens, t.row_tokens)
        for t in layout.tensors
    )


def layout_difference(layout: KVLayout, theirs: OpenPayload) -> str | None:
    """The first thing in which the peer's layout differs from ours, in words; None when equal."""
    if (theirs.layout_version, theirs.prefill_chunk_tokens) != (layout.version, layout.prefill_chunk_tokens):
        return (
            f"layout version {theirs.layout_version} with prefill chunks of {theirs.prefill_chunk_tokens} tokens there,"
            f" version {layout.version} with {layout.prefill_chunk_tokens} here"
        )
    ours = {(t.layer, t.name): t for t in layout_payload(layout)}
    their = {(t.layer, t.name): t for t in theirs.tensors}
    for key, mine in ours.items():
        other = their.get(key)
        label = f"tensor {key[1][:64]!r} of layer {key[0]}"
        if other is None:
            return f"{label} is missing there"
        for field in ("kind", "dtype", "row_shape", "window_tokens", "row_tokens"):
            if getattr(mine, field) != getattr(other, field):
                name = "shape" if field == "row_shape" else field
                return f"{label} has {name} {getattr(other, field)!r} there, {getattr(mine, field)!r} here"
    for key in their:
        if key not in ours:
            return f"tensor {key[1][:64]!r} of layer {key[0]} is extra there"
    if theirs.tensors != layout_payload(layout):
        return "the tensors come in another order there"
    return None
