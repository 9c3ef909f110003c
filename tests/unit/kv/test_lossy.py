"""Lossy 8-bit rows: what is sent is what is held, errors stay within the format's, and nothing odd is decoded."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import ProtocolError
from farfill.core.layout import DTYPE_BYTES, TensorKind, TensorLayout
from farfill.kv.codec import Codec
from farfill.kv.lossy import BLOCK_ITEMS, LARGEST, RowGroups, decode_lossy_into, encode_lossy, row_groups

LOSSY = [Codec.INT8, Codec.FP8]
DTYPES = ["bfloat16", "float16", "float32"]
# Half a step of the largest code, relative to the group's largest number (int8), or of each number (e4m3).
HALF_STEP = {Codec.INT8: 0.5 / 127, Codec.FP8: 0.5 / 8}


def raw_of(numbers: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return numbers.astype(dtype).tobytes()


def floats(raw: bytes | bytearray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, dtype).astype(np.float32)


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


@given(
    kind=st.sampled_from(LOSSY),
    dtype=st.sampled_from(DTYPES),
    items=st.integers(4, 200),
    skipped=st.integers(0, 400),
    count=st.integers(60, 900),
    seed=st.integers(0, 9),
)
def test_any_cut_decodes_to_what_the_sender_says_is_held(
    kind: Codec, dtype: str, items: int, skipped: int, count: int, seed: int
) -> None:
    raw = raw_of(normal(count, seed) * 10.0**seed, dtype) if dtype != "float16" else raw_of(normal(count, seed), dtype)
    groups, offset = RowGroups(dtype, items), skipped * DTYPE_BYTES[dtype]
    encoded = encode_lossy(kind, raw, groups, offset)
    assert encoded is not None
    wire, held = encoded
    assert len(wire) < len(raw)
    out = bytearray(len(raw))
    decode_lossy_into(kind, wire, groups, offset, memoryview(out))
    assert out == held
    was, now = floats(raw, dtype), floats(held, dtype)
    place = (np.arange(count) + skipped) // items
    for group in np.unique(place):
        mine = place == group
        largest = np.abs(was[mine]).max()
        bound = np.full(mine.sum(), largest) if kind is Codec.INT8 else np.maximum(np.abs(was[mine]), largest / 2**14)
        # The scale and the result are rounded to 8 and 8 or more bits.
        assert (np.abs(now[mine] - was[mine]) <= bound * (HALF_STEP[kind] + 2 * 2.0**-8)).all()


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_of_many_blocks_decodes_as_its_parts_do(kind: Codec, dtype: str) -> None:
    """Where blocks of work end must not show."""
    groups, width = RowGroups(dtype, 96), DTYPE_BYTES[dtype]
    raw = raw_of(normal(96 * (BLOCK_ITEMS // 40)), dtype)
    whole = encode_lossy(kind, raw, groups, 0)
    step = 96 * 10 * width
    parts = [encode_lossy(kind, raw[at : at + step], groups, at) for at in range(0, len(raw), step)]
    assert whole is not None
    assert whole[1] == b"".join(part[1] for part in parts if part is not None)


@pytest.mark.parametrize("kind", LOSSY)
def test_every_code_is_reached_and_zero_stays_zero(kind: Codec) -> None:
    numbers = np.linspace(-LARGEST[kind], LARGEST[kind], 1 << 15).astype(np.float32)
    numbers[::7] = 0.0
    small = numbers[::8] * np.float32(2.0**-12)
    values = np.concatenate([numbers, small, [LARGEST[kind]]]).astype(np.float32)
    encoded = encode_lossy(kind, values.tobytes(), RowGroups("float32", len(values)), 0)
    assert encoded is not None
    held = floats(encoded[1], "float32")
    assert (held[: 1 << 15 : 7] == 0).all()
    assert held[-1] == LARGEST[kind]
    assert len(set(encoded[0][2:])) >= 200


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_travel_losslessly(kind: Codec, bad: float) -> None:
    numbers = normal(256)
    numbers[100] = bad
    assert encode_lossy(kind, raw_of(numbers, "bfloat16"), RowGroups("bfloat16", 64), 0) is None


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-44, 3e38])
def test_extreme_sizes_stay_finite(kind: Codec, scale: float) -> None:
    numbers = np.clip(normal(256), -1, 1) * np.float32(scale)
    encoded = encode_lossy(kind, numbers.tobytes(), RowGroups("float32", 64), 0)
    assert encoded is not None
    held = floats(encoded[1], "float32")
    assert np.isfinite(held).all()
    assert np.abs(held).max() <= scale * 1.01


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize(("change", "place"), [(-1, 0), (1, 0), (0, 2)])
def test_a_stream_of_another_length_is_refused(kind: Codec, change: int, place: int) -> None:
    groups = RowGroups("bfloat16", 64)
    encoded = encode_lossy(kind, raw_of(normal(256), "bfloat16"), groups, 0)
    assert encoded is not None
    wire = (encoded[0] + b"x")[: len(encoded[0]) + change]
    with pytest.raises(ProtocolError) as caught:
        decode_lossy_into(kind, wire, groups, place, memoryview(bytearray(512)))
    assert caught.value.reason == "bad_codec_stream"


@given(st.sampled_from(LOSSY), st.binary(max_size=200), st.integers(1, 200), st.integers(1, 80), st.integers(0, 99))
def test_any_stream_decodes_within_its_place_or_is_refused(
    kind: Codec, wire: bytes, nbytes: int, items: int, skipped: int
) -> None:
    guarded = bytearray(nbytes + 16)
    with contextlib.suppress(ProtocolError):
        decode_lossy_into(kind, wire, RowGroups("bfloat16", items), 2 * skipped, memoryview(guarded)[:nbytes])
    assert not any(guarded[nbytes:])


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "items"),
    [
        (TensorKind.FULL, "bfloat16", (8, 128), 128),
        (TensorKind.WINDOW, "float16", (1, 256), 256),
        (TensorKind.LATENT, "float32", (576,), 576),
        (TensorKind.FULL, "float8_e4m3fn", (8, 128), None),
        (TensorKind.FULL, "int8", (8, 128), None),
        (TensorKind.RECURRENT, "float32", (4, 32, 32), None),
        (TensorKind.CONV, "bfloat16", (3, 96), None),
    ],
)
def test_only_rows_of_wide_floats_may_travel_lossy(
    kind: TensorKind, dtype: str, shape: tuple[int, ...], items: int | None
) -> None:
    groups = row_groups(TensorLayout(0, "k", kind, dtype, shape, 8))
    assert groups == (None if items is None else RowGroups(dtype, items))
