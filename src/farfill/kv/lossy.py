"""Lossy 8-bit forms of cache rows, one scale per token and head. Opt-in (`kv_transfer.lossy`); pure.

A group is one token's numbers of one head (the last axis of `row_shape`); a chunk may begin or end inside one. The
stream is one bfloat16 scale per group the chunk touches, then one byte per number: int8 (symmetric, ±127) or
float8 e4m3 (±448). Decoding is a table or an integer times a scale, rounded to the tensor's dtype, the same on every
host bit for bit; so the sender knows what the receiver is to hold, and the checksum is of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farfill.core.errors import ProtocolError
from farfill.core.layout import DTYPE_BYTES, TensorKind, TensorLayout
from farfill.kv.codec import Buffer, Codec

LARGEST = {Codec.INT8: 127.0, Codec.FP8: 448.0}
# Smaller groups become zeros: with it no product is subnormal, whose treatment differs between hosts.
LEAST_SCALE = 2.0**-100
BLOCK_ITEMS = 16 * 1024
_KINDS = (TensorKind.FULL, TensorKind.LATENT, TensorKind.WINDOW)
_DTYPES = ("bfloat16", "float16", "float32")

_STEPS, _STEPS_BITS = 2.0**14, 0x46800000

_Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class RowGroups:
    """How the numbers of one tensor's chunks share scales. `items` numbers are a group."""

    dtype: str
    items: int

    def skipped(self, offset: int) -> int:
        """Numbers of a group that lie before byte `offset` of a piece."""
        return offset // DTYPE_BYTES[self.dtype] % self.items


def row_groups(tensor: TensorLayout) -> RowGroups | None:
    """The groups of a tensor that may travel lossy; None for states, and for what is no float of 16 or 32 bits."""
    if tensor.kind not in _KINDS or tensor.dtype not in _DTYPES or not tensor.row_shape:
        return None
    return RowGroups(tensor.dtype, tensor.row_shape[-1])


def encode_lossy(codec: Codec, raw: Buffer, groups: RowGroups, offset: int) -> tuple[bytes, bytes] | None:
    """(stream, the bytes it decodes to) of a chunk at byte `offset` of its piece.

    None when it must travel losslessly: a number is not finite, or the stream would not be smaller.
    """
    source, width = np.frombuffer(raw, dtype=np.uint8), DTYPE_BYTES[groups.dtype]
    count, first = len(raw) // width, groups.skipped(offset)
    touched = -(-(first + count) // groups.items)
    if 2 * touched + count >= len(raw):
        return None
    stream, held = np.empty(2 * touched + count, dtype=np.uint8), np.empty(len(raw), dtype=np.uint8)
    scale_bits, coded = stream[: 2 * touched].view("<u2"), stream[2 * touched :]
    for start, end, row in _blocks(count, first, groups.items):
        grouped = _grouped(_to_floats(source[start * width : end * width], groups.dtype), groups, first + start)
        # Without the sign, floats order as the integers with the same bits, whose maximum is found faster.
        largest = (grouped.view(np.int32) & 0x7FFFFFFF).max(axis=1).view(np.float32)
        if not np.isfinite(largest).all():
            return None
        bits = _bfloat16_bits(np.maximum(largest / LARGEST[codec], LEAST_SCALE).astype(np.float32))
        grouped = grouped / _from_bfloat16(bits)[:, None]
        np.clip(grouped, -LARGEST[codec], LARGEST[codec], out=grouped)
        codes = np.rint(grouped).astype(np.int8).view(np.uint8) if codec is Codec.INT8 else _to_e4m3(grouped)
        scale_bits[row : row + len(bits)] = bits
        lead = (first + start) % groups.items
        coded[start:end] = codes.reshape(-1)[lead : lead + end - start]
        held[start * width : end * width] = _decoded(codec, coded[start:end], bits, groups, first + start)
    return stream.tobytes(), held.tobytes()


def decode_lossy_into(codec: Codec, wire: Buffer, groups: RowGroups, offset: int, out: memoryview) -> None:
    """Fill writable, contiguous `out`. Raises ProtocolError unless the stream is as long as `out` and place demand."""
    width, first = DTYPE_BYTES[groups.dtype], groups.skipped(offset)
    count = len(out) // width
    touched = -(-(first + count) // groups.items)
    if len(wire) != 2 * touched + count or len(out) % width:
        raise ProtocolError(
            f"a lossy stream of {len(wire)} bytes for {count} numbers in {touched} groups", reason="bad_codec_stream"
        )
    scale_bits = np.frombuffer(wire, dtype="<u2", count=touched).astype(np.uint16)
    coded, target = np.frombuffer(wire, dtype=np.uint8, offset=2 * touched), np.frombuffer(out, dtype=np.uint8)
    for start, end, row in _blocks(count, first, groups.items):
        bits = scale_bits[row : row + -(-((first + start) % groups.items + end - start) // groups.items)]
        target[start * width : end * width] = _decoded(codec, coded[start:end], bits, groups, first + start)


def _decoded(codec: Codec, coded: _Bytes, scale_bits: _U16, groups: RowGroups, place: int) -> _Bytes:
    """The bytes of numbers from `place` of a group on."""
    values = coded.view(np.int8).astype(np.float32) if codec is Codec.INT8 else _E4M3.take(coded)
    lead = place % groups.items
    # A hostile stream may hold any scale; what comes out is checked against the checksum like everything else.
    with np.errstate(all="ignore"):
        grouped = _grouped(values, groups, place) * _from_bfloat16(scale_bits)[:, None]
        return _from_floats(grouped.reshape(-1)[lead : lead + len(coded)], groups.dtype).view(np.uint8)


def _blocks(count: int, first: int, items: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, index of the first group) of runs of numbers that end with a group and stay in the CPU's cache."""
    rows = max(1, BLOCK_ITEMS // items)
    start = row = 0
    while start < count:
        end = min((row + rows) * items - first, count)
        yield start, end, row
        start, row = end, row + rows


def _grouped(numbers: _Floats, groups: RowGroups, place: int) -> _Floats:
    """Numbers from `place` of a group on as rows of one group each; zeros stand for what lies in other chunks."""
    lead = place % groups.items
    padded = -(-(lead + len(numbers)) // groups.items) * groups.items
    if padded != len(numbers):
        whole = np.zeros(padded, dtype=np.float32)
        whole[lead : lead + len(numbers)] = numbers
        numbers = whole
    return numbers.reshape(-1, groups.items)


def _to_floats(raw: _Bytes, dtype: str) -> _Floats:
    if dtype == "bfloat16":
        return _from_bfloat16(raw.view("<u2").astype(np.uint16))
    return raw.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _from_floats(numbers: _Floats, dtype: str) -> npt.NDArray[np.generic]:
    if dtype == "bfloat16":
        return _bfloat16_bits(numbers).astype("<u2")
    return np.ascontiguousarray(numbers.astype("<f2" if dtype == "float16" else "<f4"))


def _from_bfloat16(bits: _U16) -> _Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bfloat16_bits(numbers: _Floats) -> _U16:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _to_e4m3(numbers: _Floats) -> _Bytes:
    """Codes of numbers within ±448 (OCP 8-bit floating point specification: bias 7, 3 bits of mantissa)."""
    bits = np.ascontiguousarray(numbers).view(np.int32)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Normal ones: round the mantissa to 3 bits (ties to even; a carry moves the exponent), then change the bias.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2**-6 codes count steps of 2**-9, which are the last bits of numbers from 2**14 on.
    steps = (np.abs(numbers) + np.float32(_STEPS)).view(np.int32) - _STEPS_BITS
    np.copyto(normal, steps, where=size < 0x3C800000)
    return (sign | normal).astype(np.uint8)


def _e4m3_values() -> _Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >= 128, -size, size).astype(np.float32)


_E4M3 = _e4m3_values()
