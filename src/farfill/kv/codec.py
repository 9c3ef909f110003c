"""Lossless codecs for chunks of cache bytes, and the choice among them. Pure; no state is shared.

Float caches compress only when bytes of equal weight stand together, so `lz4` and `zstd` first split the
items of a chunk into byte planes (all first bytes, then all second bytes, ...). Decoding is bounded by the raw
length the receiver derived itself: no stream can make it allocate more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import lz4.block  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import zstandard

from farfill.core.errors import ProtocolError

ZSTD_LEVEL = 1
# A codec must promise at least this much less time than `none`: estimates err, and CPU has other uses.
WORTHWHILE = 0.9

Buffer = bytes | bytearray | memoryview


class Codec(IntEnum):
    """Numbers are the wire format (`FrameHeader.codec`)."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


@dataclass(frozen=True, slots=True)
class CodecSample:
    """What one codec did to a sample: raw/wire ratio, and raw bytes per second of one core each way."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


class ChunkCodec:
    """Encodes and decodes chunks. Holds compressor contexts, so each thread needs its own."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, codec: Codec, raw: Buffer, item_bytes: int) -> tuple[Codec, Buffer]:
        """`raw` encoded, with the codec really used: `none` (and `raw` itself) when encoding saves nothing."""
        if codec is Codec.NONE:
            return codec, raw
        planes = _to_planes(raw, item_bytes)
        wire: bytes
        if codec is Codec.LZ4:
            wire = bytes(lz4.block.compress(planes, store_size=False))  # pyright: ignore
        else:
            wire = self._compressor.compress(planes)
        return (codec, wire) if len(wire) < len(raw) else (Codec.NONE, raw)

    def decode_into(self, codec: Codec, wire: Buffer, item_bytes: int, out: memoryview) -> None:
        """Fill writable, contiguous `out` with the raw bytes. Raises ProtocolError unless they fit exactly."""
        if codec is Codec.NONE:
            if len(wire) != len(out):
                raise ProtocolError(f"{len(wire)} bytes for {len(out)}", reason="bad_codec_stream")
            out[:] = wire
            return
        planes = self._lz4(wire, len(out)) if codec is Codec.LZ4 else self._zstd(wire, len(out))
        if len(planes) != len(out):
            raise ProtocolError(f"decoded {len(planes)} bytes for {len(out)}", reason="bad_codec_stream")
        _from_planes(planes, item_bytes, out)

    def _lz4(self, wire: Buffer, raw_bytes: int) -> bytes:
        try:
            return lz4.block.decompress(wire, uncompressed_size=raw_bytes)  # pyright: ignore
        except (lz4.block.LZ4BlockError, ValueError) as error:  # pyright: ignore
            raise ProtocolError(f"lz4: {error}", reason="bad_codec_stream") from error

    def _zstd(self, wire: Buffer, raw_bytes: int) -> bytes:
        # The frame's own content size decides the allocation: it is checked before it is believed.
        try:
            claimed = zstandard.get_frame_parameters(wire).content_size
            if claimed != raw_bytes:
                raise ProtocolError(f"zstd frame claims {claimed} bytes for {raw_bytes}", reason="bad_codec_stream")
            return self._decompressor.decompress(wire, max_output_size=raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"zstd: {error}", reason="bad_codec_stream") from error


def choose_codec(
    samples: Mapping[Codec, CodecSample],
    link_bytes_per_s: float | None,
    lanes: int,
    achieved: Mapping[Codec, float] | None = None,
) -> Codec:
    """The codec with the most raw bytes per second over a link of `link_bytes_per_s`.

    Estimated: encode on up to `lanes` cores, link and decode overlap, so the slowest stage decides. What was
    `achieved` (raw bytes per second, by codec) overrules the estimate: other work may need the cores too.
    `none` until link and codec were measured, and unless the gain is worthwhile.
    """
    achieved = achieved or {}
    plain = achieved.get(Codec.NONE) or link_bytes_per_s
    if not link_bytes_per_s or not plain:
        return Codec.NONE
    best, best_rate = Codec.NONE, plain / WORTHWHILE
    for codec, sample in samples.items():
        if codec is Codec.NONE:
            continue
        rate = achieved.get(codec) or min(
            link_bytes_per_s * sample.ratio,
            sample.encode_bytes_per_s * lanes,
            sample.decode_bytes_per_s * lanes,
        )
        if rate > best_rate:
            best, best_rate = codec, rate
    return best


def _to_planes(raw: Buffer, item_bytes: int) -> Buffer:
    """Byte planes of whole items; bytes after the last whole item follow unchanged."""
    items = len(raw) // item_bytes
    if item_bytes == 1 or items == 0:
        return raw
    source = np.frombuffer(raw, dtype=np.uint8)
    out = np.empty(len(raw), dtype=np.uint8)
    body = items * item_bytes
    np.copyto(out[:body].reshape(item_bytes, items), source[:body].reshape(items, item_bytes).T)
    out[body:] = source[body:]
    return out.data


def _from_planes(planes: Buffer, item_bytes: int, out: memoryview) -> None:
    """The inverse of `_to_planes`."""
    source = np.frombuffer(planes, dtype=np.uint8)
    target = np.frombuffer(out, dtype=np.uint8)
    items = len(out) // item_bytes
    body = items * item_bytes
    if body:
        np.copyto(target[:body].reshape(items, item_bytes), source[:body].reshape(item_bytes, items).T)
    target[body:] = source[body:]
