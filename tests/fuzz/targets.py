"""What the fuzzers feed: every parser of bytes from the wire. A target may raise nothing: it says whether it accepted.

Each target takes raw bytes and first spends a few on choices. What parses must also survive being packed again. `SEEDS`
are valid inputs to start from.
"""

from __future__ import annotations

import base64
import functools
import socket
import struct
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from farfill.clock import WallClock
from farfill.core.errors import IncompatiblePeerError, ProtocolError, TicketError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.core.ticket import Ticket
from farfill.kv.codec import ChunkCodec, Codec
from farfill.kv.lossy import RowGroups, decode_lossy_into, encode_lossy
from farfill.kv.manifest import build_manifest
from farfill.transfer.grid import ChunkGrid, unpack_bitmap
from farfill.transfer.tickets import TicketSigner, TicketVerifier
from farfill.transport.errors import TransportError
from farfill.transport.sealed import KEY_BYTES, RECORD_BYTES, SealedReader, SealedWriter
from farfill.wire.control import EndEvent, TokensEvent
from farfill.wire.events import MAX_EVENT_BYTES, EventReader, encode_event
from farfill.wire.frames import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    AcceptPayload,
    EarlyGrant,
    FrameHeader,
    FrameType,
    HelloPayload,
    OpenPayload,
    ReasonPayload,
    decode_payload,
    encode_frame,
    layout_difference,
    layout_payload,
    unpack_header,
)
from support.pki import make_ticket_keys

MAX_RAW_BYTES = 1024 * 1024
PAYLOADS = (HelloPayload, ReasonPayload, OpenPayload, AcceptPayload, EarlyGrant)
_SEAL = bytes(KEY_BYTES)
ITEM_BYTES = (1, 2, 4, 8)
LOSSLESS = tuple(codec for codec in Codec if not codec.lossy)
LOSSY_DTYPES = ("bfloat16", "float16", "float32")
LAYOUT = KVLayout(
    (
        TensorLayout(0, "k", TensorKind.FULL, "bfloat16", (2, 64)),
        TensorLayout(1, "state", TensorKind.RECURRENT, "float32", (4, 32, 32)),
    ),
    prefill_chunk_tokens=512,
)
MANIFEST = build_manifest(LAYOUT, 2000)
_PRIVATE, _PUBLIC = make_ticket_keys()
_TICKET = Ticket(
    transfer_id="t",
    fingerprint="f" * 64,
    tenant="tenant",
    prefill="prefill-far",
    decode="decode-near",
    num_tokens=1999,
    issued_unix_s=0.0,
    expires_unix_s=4e9,
)


def header(data: bytes) -> bool:
    """A frame header, and with what follows it a whole control frame."""
    try:
        parsed = unpack_header(data[:HEADER_BYTES])
    except (ProtocolError, IncompatiblePeerError):
        return False
    assert parsed.pack() == data[:HEADER_BYTES]
    limit = MAX_CHUNK_BYTES if parsed.type is FrameType.CHUNK else MAX_CONTROL_BYTES
    assert parsed.wire_bytes <= limit
    assert parsed.raw_bytes <= MAX_CHUNK_BYTES or parsed.type is not FrameType.CHUNK
    return True


def payload(data: bytes) -> bool:
    """HELLO, REFUSE, OPEN, ACCEPT and CREDIT, and what is made of them."""
    if not data:
        return False
    kind = PAYLOADS[data[0] % len(PAYLOADS)]
    try:
        parsed = decode_payload(kind, data[1:])
    except ProtocolError:
        return False
    if isinstance(parsed, OpenPayload):
        difference = layout_difference(LAYOUT, parsed)
        assert difference is None or len(difference) < 16 * MAX_CONTROL_BYTES
        again = encode_frame(FrameHeader(FrameType.OPEN), parsed)
        assert decode_payload(OpenPayload, again[HEADER_BYTES:]) == parsed
    elif isinstance(parsed, AcceptPayload):
        try:
            grid = ChunkGrid(MANIFEST, parsed.chunk_bytes)
            held = unpack_bitmap(parsed.held, grid.num_chunks)
        except ProtocolError:
            return False
        assert all(grid.chunk(index).nbytes > 0 for index in held)
    return True


def codec_stream(data: bytes) -> bool:
    """A chunk's payload, decoded into as many bytes as its header declared."""
    if len(data) < 5:
        return False
    kind, item_bytes = LOSSLESS[data[0] % 3], ITEM_BYTES[data[0] // 3 % 4]
    out = bytearray(int.from_bytes(data[1:5], "big") % MAX_RAW_BYTES + 1)
    codec = _codec()
    try:
        codec.decode_into(kind, data[5:], item_bytes, memoryview(out))
    except ProtocolError:
        return False
    used, wire = codec.encode(kind, out, item_bytes)
    again = bytearray(len(out))
    codec.decode_into(used, wire, item_bytes, memoryview(again))
    assert again == out
    return True


def lossy_stream(data: bytes) -> bool:
    """The same for rows that travel lossy. What was decoded once is decoded to the same bytes after another round."""
    if len(data) < 7:
        return False
    kind = (Codec.INT8, Codec.FP8)[data[0] % 2]
    groups, offset = RowGroups(LOSSY_DTYPES[data[0] // 2 % 3], data[1] + 1), 4 * data[2]
    out = bytearray(int.from_bytes(data[3:7], "big") % MAX_RAW_BYTES + 1)
    try:
        decode_lossy_into(kind, data[7:], groups, offset, memoryview(out))
    except ProtocolError:
        return False
    encoded = encode_lossy(kind, out, groups, offset)
    if encoded is not None:
        again = bytearray(len(out))
        decode_lossy_into(kind, encoded[0], groups, offset, memoryview(again))
        assert again == encoded[1]
    return True


def events(data: bytes) -> bool:
    """A stream of generation events that comes in two parts."""
    if not data:
        return False
    cut = data[0] * len(data) // 256 + 1
    reader = EventReader()
    try:
        parsed = [event for part in (data[1:cut], data[cut:]) for event in reader.feed(part)]
    except ProtocolError:
        return False
    assert sum(len(encode_event(event)) for event in parsed) <= 2 * MAX_EVENT_BYTES
    return reader.at_boundary


def sealed(data: bytes) -> bool:
    """What comes on a connection of sealed records, in two parts; the first byte says where it is cut."""
    if not data:
        return False
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        reader, place, opened = SealedReader(_SEAL, far), memoryview(bytearray(RECORD_BYTES)), 0
        cut = 1 + data[0] * len(data) // 256
        try:
            for part in (data[1:cut], data[cut:]):
                near.sendall(part)
                while count := reader.recv_into(place):
                    opened += count
        except TransportError:
            return False
    assert opened < len(data)
    return opened > 0


def token(data: bytes) -> bool:
    """A ticket as text, and a signed one with other content than a ticket."""
    if not data:
        return False
    text = data[1:].decode("utf-8", "replace") if data[0] % 2 else _signed(data[1:])
    try:
        ticket = _verifier().verify(text)
    except TicketError:
        return False
    assert data[0] % 2 == 0 or ticket == _TICKET
    return True


@functools.cache
def _codec() -> ChunkCodec:
    return ChunkCodec()


@functools.cache
def _verifier() -> TicketVerifier:
    return TicketVerifier(_PUBLIC, WallClock(), 5.0)


@functools.cache
def _signer() -> TicketSigner:
    return TicketSigner(_PRIVATE)


def _signed(content: bytes) -> str:
    """As a holder of the key would sign whatever content."""
    signature = _signer()._key.sign(b"farfill-ticket-1\0" + content)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (content, signature))


def _header_seeds() -> list[bytes]:
    chunk = FrameHeader(FrameType.CHUNK, b"t" * 16, 3, 65536, 65536, 4096, 1, 1, b"c" * 16, 1)
    return [FrameHeader(kind).pack() for kind in FrameType if kind is not FrameType.CHUNK] + [
        chunk.pack(),
        replace(chunk, codec=0, wire_bytes=65536).pack(),
    ]


def _payload_seeds() -> list[bytes]:
    known = (
        HelloPayload(1, "f" * 64, "prefill-far", "g"),
        ReasonPayload("bad_frame", "words"),
        OpenPayload("a.b", MANIFEST.digest, 2000, 1, 512, 65536, layout_payload(LAYOUT)),
        AcceptPayload(65536, bytes(-(-ChunkGrid(MANIFEST, 65536).num_chunks // 8))),
        EarlyGrant(1 << 20, 65536),
    )
    return [
        bytes([number]) + encode_frame(FrameHeader(FrameType.HELLO), value)[HEADER_BYTES:]
        for number, value in enumerate(known)
    ]


def _codec_seeds() -> list[bytes]:
    numbers = np.arange(2048, dtype=np.float32).tobytes()
    seeds = []
    for kind in LOSSLESS:
        for choice, item_bytes in enumerate(ITEM_BYTES):
            used, wire = _codec().encode(kind, numbers, item_bytes)
            seeds.append(struct.pack(">BI", used + 3 * choice, len(numbers) - 1) + bytes(wire))
    return seeds


def _lossy_seeds() -> list[bytes]:
    numbers = np.arange(2048, dtype=np.float32).tobytes()
    seeds = []
    for choice, kind in enumerate((Codec.INT8, Codec.FP8)):
        for place in (0, 5):
            encoded = encode_lossy(kind, numbers, RowGroups("float32", 64), 4 * place)
            assert encoded is not None
            seeds.append(struct.pack(">BBBI", choice + 4, 63, place, len(numbers) - 1) + encoded[0])
    return seeds


def _event_seeds() -> list[bytes]:
    first = TokensEvent(index=0, token_ids=[1, 2], text="words")
    last = EndEvent(completion_tokens=2)
    return [b"\x80" + encode_event(first) + encode_event(last), b"\x00" + encode_event(last)]


def _sealed_seeds() -> list[bytes]:
    seeds = []
    for sizes in ((64,), (1, 2, 3), (64, 1000, 64)):
        near, far = socket.socketpair()
        with near, far:
            writer = SealedWriter(_SEAL, near)
            for size in sizes:
                writer.send(memoryview(bytes(size)))
            writer.flush()
            seeds.append(b"\x80" + far.recv(MAX_RAW_BYTES))
    return seeds


def _token_seeds() -> list[bytes]:
    return [
        b"\x01" + _signer().sign(_TICKET).encode(),
        b"\x00" + msgspec.msgpack.encode(_TICKET),
    ]


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "header": header,
    "payload": payload,
    "codec": codec_stream,
    "lossy": lossy_stream,
    "events": events,
    "sealed": sealed,
    "token": token,
}
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "header": _header_seeds,
    "payload": _payload_seeds,
    "codec": _codec_seeds,
    "lossy": _lossy_seeds,
    "events": _event_seeds,
    "sealed": _sealed_seeds,
    "token": _token_seeds,
}
