"""Lossless codecs for chunks of cache bytes, and the choice among them. Pure; no state is shared.

`lz4` shuffles the bits of the numbers before it looks for repetitions (Blosc does both). `zstd` cuts them into byte
planes (`kv.codec_planes`) and compresses the planes that are worth it: of a bfloat16 cache the exponents (about 3 of
8 bits are information), not signs and mantissas (noise). Its stream is one little-endian uint32 length per plane, the
planes (one as long as it has items is raw), and the bytes after the last whole item. Decoding is bounded by the raw
length the receiver derived itself: no stream can make it allocate more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any

import numcodecs.blosc as untyped_blosc  # pyright: ignore
import numpy as np
import zstandard

from farfill.core.errors import ProtocolError
from farfill.kv.codec_planes import Bytes, PlaneSplitter, bits_per_byte

# Exponents hardly repeat in sequences. Looking for long ones only, in a tiny table, makes zstd an entropy coder:
# three times the speed of level 1, and a better ratio, since no bits go into short matches.
ZSTD_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)
# A plane with more bits of information per byte travels raw.
WORTH_BITS_PER_BYTE = 7.5
# A codec must promise at least this much less time than `none`: estimates err, and CPU has other uses.
WORTHWHILE = 0.9

LZ4_LEVEL = 5
# Small enough for the cache; also what LZ4 can look back.
LZ4_BLOCK_BYTES = 64 * 1024
blosc: Any = untyped_blosc  # pyright: ignore[reportUnknownVariableType]
# One chunk is compressed by the thread that has it: others have chunks of their own.
blosc.use_threads = False

_LENGTH = Struct("<I")
# Of Blosc's header: raw bytes, block bytes and bytes of the whole stream.
_BLOSC_HEADER = Struct("<4xIII")

Buffer = bytes | bytearray | memoryview


class Codec(IntEnum):
    """Numbers are the wire format (`FrameHeader.codec`). The last two are lossy: see `kv.lossy`."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2
    INT8 = 3
    FP8 = 4

    @property
    def lossy(self) -> bool:
        """Whether what arrives differs from what the engine computed."""
        return self in (Codec.INT8, Codec.FP8)


@dataclass(frozen=True, slots=True)
class CodecSample:
    """What one codec did to a sample: raw/wire ratio, and raw bytes per second of one core each way."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


class ChunkCodec:
    """Encodes and decodes chunks. Holds contexts and scratch memory, so each thread needs its own."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=ZSTD_PARAMETERS)
        self._decompressor = zstandard.ZstdDecompressor()
        self._splitter = PlaneSplitter()
        self._planes = np.empty(0, dtype=np.uint8)

    def encode(self, codec: Codec, raw: Buffer, item_bytes: int) -> tuple[Codec, Buffer]:
        """`raw` encoded, with the codec really used: `none` (and `raw` itself) when encoding saves nothing."""
        assert not codec.lossy, "kv.lossy encodes those"
        items = len(raw) // item_bytes
        if codec is Codec.NONE or not items:
            return Codec.NONE, raw
        if codec is Codec.LZ4:
            return self._shuffle(raw, item_bytes)
        source = np.frombuffer(raw, dtype=np.uint8)
        body = items * item_bytes
        if len(self._planes) < body:
            self._planes = np.empty(body, dtype=np.uint8)
        planes = self._planes[:body].reshape(item_bytes, items)
        self._splitter.split(source[:body], planes)
        parts = [self._pack(plane) for plane in planes]
        wire_bytes = item_bytes * _LENGTH.size + sum(len(part) for part in parts) + len(raw) - body
        if wire_bytes >= len(raw):
            return Codec.NONE, raw
        lengths = b"".join(_LENGTH.pack(len(part)) for part in parts)
        return codec, b"".join([lengths, *parts, source[body:].data])

    def decode_into(self, codec: Codec, wire: Buffer, item_bytes: int, out: memoryview) -> None:
        """Fill writable, contiguous `out` with the raw bytes. Raises ProtocolError unless they fit exactly."""
        if codec is Codec.NONE:
            if len(wire) != len(out):
                raise _refused(f"{len(wire)} bytes for {len(out)}")
            out[:] = wire
            return
        if codec.lossy:
            raise _refused(f"{codec.name} is no lossless codec")
        if codec is Codec.LZ4:
            self._unshuffle(wire, out)
            return
        items = len(out) // item_bytes
        view, at, planes = memoryview(wire), item_bytes * _LENGTH.size, list[Bytes]()
        if len(view) < at:
            raise _refused(f"{len(view)} bytes have no room for the lengths of {item_bytes} planes")
        for (length,) in _LENGTH.iter_unpack(view[:at]):
            if length > min(items, len(view) - at):
                raise _refused(f"a plane of {length} bytes, {items} expected and {len(view) - at} there")
            planes.append(self._unpack(view[at : at + length], items))
            at += length
        target = np.frombuffer(out, dtype=np.uint8)
        body = items * item_bytes
        if len(view) - at != len(out) - body:
            raise _refused(f"{len(view) - at} bytes after the planes, {len(out) - body} expected")
        self._splitter.join(planes, target[:body])
        target[body:] = np.frombuffer(view[at:], dtype=np.uint8)

    def _shuffle(self, raw: Buffer, item_bytes: int) -> tuple[Codec, Buffer]:
        """`lz4` of the bits of equal weight together."""
        packed: bytes = blosc.compress(raw, b"lz4", LZ4_LEVEL, blosc.BITSHUFFLE, LZ4_BLOCK_BYTES, item_bytes)
        return (Codec.LZ4, packed) if len(packed) < len(raw) else (Codec.NONE, raw)

    def _unshuffle(self, wire: Buffer, out: memoryview) -> None:
        # The header says how much is read and written: it is checked before it is believed.
        if len(wire) < blosc.MAX_OVERHEAD:
            raise _refused(f"{len(wire)} bytes are no lz4 stream")
        raw_bytes, _, wire_bytes = _BLOSC_HEADER.unpack_from(wire)
        if (raw_bytes, wire_bytes) != (len(out), len(wire)):
            raise _refused(f"lz4 stream of {wire_bytes} bytes for {raw_bytes}, {len(wire)} for {len(out)} expected")
        try:
            blosc.decompress(wire, out)
        except (RuntimeError, ValueError) as error:
            raise _refused(f"lz4: {error}") from error

    def _pack(self, plane: Bytes) -> Buffer:
        if bits_per_byte(plane) > WORTH_BITS_PER_BYTE:
            return plane.data
        packed = self._compressor.compress(plane.data)
        return packed if len(packed) < len(plane) else plane.data

    def _unpack(self, packed: memoryview, items: int) -> Bytes:
        if len(packed) == items:
            return np.frombuffer(packed, dtype=np.uint8)
        plane = self._zstd(packed, items)
        if len(plane) != items:
            raise _refused(f"a plane of {len(plane)} bytes decoded, {items} expected")
        return np.frombuffer(plane, dtype=np.uint8)

    def _zstd(self, packed: memoryview, raw_bytes: int) -> bytes:
        # The frame's own content size decides the allocation: it is checked before it is believed.
        try:
            claimed = zstandard.get_frame_parameters(packed).content_size
            if claimed != raw_bytes:
                raise _refused(f"zstd frame claims {claimed} bytes for {raw_bytes}")
            return self._decompressor.decompress(packed, max_output_size=raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise _refused(f"zstd: {error}") from error


def choose_codec(
    samples: Mapping[Codec, CodecSample], link_bytes_per_s: float, lanes: int, *, current: Codec = Codec.NONE
) -> Codec:
    """The codec with the most raw bytes per second over a link of `link_bytes_per_s` (on the wire, > 0).

    Encode on up to `lanes` cores, link and decode overlap, so the slowest of them decides. Leaving `none` takes a
    worthwhile gain; what is in use (`current`) stays while it has any over `none` and no other is worth the change.
    """
    rates = {
        codec: min(
            link_bytes_per_s * sample.ratio,
            sample.encode_bytes_per_s * lanes,
            sample.decode_bytes_per_s * lanes,
        )
        for codec, sample in samples.items()
        if codec is not Codec.NONE
    }
    rates[Codec.NONE] = link_bytes_per_s
    kept = current if rates.get(current, 0.0) > link_bytes_per_s else Codec.NONE
    best = max(rates, key=lambda codec: rates[codec])
    return best if rates[best] * WORTHWHILE > rates[kept] else kept


def _refused(detail: str) -> ProtocolError:
    return ProtocolError(detail, reason="bad_codec_stream")
