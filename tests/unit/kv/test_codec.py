"""Lossless codecs: exact round trips, bounded decoding, and a choice that never loses to `none`."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]

from farfill.core.errors import ProtocolError
from farfill.kv.codec import WORTHWHILE, ChunkCodec, Codec, CodecSample, choose_codec
from farfill.kv.codec_planes import BLOCK_BYTES

PACKED = [Codec.LZ4, Codec.ZSTD]
codec = ChunkCodec()


@given(st.sampled_from([Codec.NONE, *PACKED]), st.binary(min_size=1, max_size=5000), st.sampled_from([1, 2, 4, 8]))
def test_any_bytes_survive_the_round_trip(kind: Codec, raw: bytes, item_bytes: int) -> None:
    used, wire = codec.encode(kind, raw, item_bytes)
    assert len(wire) <= len(raw)
    out = bytearray(len(raw))
    codec.decode_into(used, wire, item_bytes, memoryview(out))
    assert out == raw


@pytest.mark.parametrize("kind", PACKED)
def test_bfloat16_caches_shrink_only_thanks_to_the_width_of_their_numbers(kind: Codec) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    as_numbers = len(codec.encode(kind, raw, 2)[1])
    as_bytes = len(codec.encode(kind, raw, 1)[1])
    assert as_numbers < as_bytes
    assert len(raw) / as_numbers > (1.4 if kind is Codec.ZSTD else 1.15)


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("extra", [0, 1, 3, 7])
def test_chunks_longer_than_a_block_survive_the_round_trip(kind: Codec, item_bytes: int, extra: int) -> None:
    numbers = np.random.default_rng(1).normal(size=BLOCK_BYTES).astype(np.float32)
    raw = numbers.tobytes()[: 2 * BLOCK_BYTES + 3 * item_bytes] + bytes(extra)
    used, wire = codec.encode(kind, raw, item_bytes)
    out = bytearray(len(raw))
    codec.decode_into(used, wire, item_bytes, memoryview(out))
    assert out == raw


@pytest.mark.parametrize(("dtype", "item_bytes"), [("<f2", 2), ("<f4", 4), ("<i8", 8), ("u1", 1)])
def test_numbers_of_every_width_shrink_when_they_hold_little(dtype: str, item_bytes: int) -> None:
    raw = np.random.default_rng(0).normal(scale=3, size=1 << 16).clip(0, 9).astype(dtype).tobytes()
    assert len(codec.encode(Codec.ZSTD, raw, item_bytes)[1]) < 0.9 * len(raw)


def test_special_values_survive_bit_for_bit() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)  # every bfloat16, infinities and NaNs with it
    raw = np.repeat(bits, 3).tobytes()
    used, wire = codec.encode(Codec.ZSTD, raw, 2)
    out = bytearray(len(raw))
    codec.decode_into(used, wire, 2, memoryview(out))
    assert used is Codec.ZSTD
    assert out == raw


@pytest.mark.parametrize("kind", PACKED)
def test_random_bytes_travel_raw(kind: Codec) -> None:
    raw = np.random.default_rng(0).bytes(1 << 16)
    used, wire = codec.encode(kind, raw, 2)
    assert used is Codec.NONE
    assert wire is raw


BOMB = bytes(1 << 24)


def stream(first: bytes, second: bytes = bytes(50), tail: bytes = b"") -> bytes:
    """Two planes as the wire has them."""
    return struct.pack("<II", len(first), len(second)) + first + second + tail


def shuffled(raw: bytes, **header: int) -> bytes:
    """What `lz4` makes of `raw`, with other numbers in its header."""
    wire = bytearray(blosc.compress(raw, b"lz4", 5, blosc.BITSHUFFLE, typesize=2))
    for name, value in header.items():
        struct.pack_into("<I", wire, {"raw_bytes": 4, "block_bytes": 8, "wire_bytes": 12}[name], value)
    return bytes(wire)


BOMBS = {
    "zstd_claims_more": (Codec.ZSTD, stream(zstandard.ZstdCompressor().compress(BOMB)[:49])),
    "zstd_claims_nothing": (
        Codec.ZSTD,
        stream(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50))),
    ),
    "lz4_expands": (Codec.LZ4, shuffled(bytes(1 << 12))),
    "lz4_claims_the_length_and_expands": (Codec.LZ4, shuffled(bytes(1 << 12), raw_bytes=100)),
    "lz4_claims_to_be_longer_than_it_is": (Codec.LZ4, shuffled(bytes(100), wire_bytes=1 << 20)),
    "lz4_claims_huge_blocks": (Codec.LZ4, shuffled(bytes(100), block_bytes=0xFFFFFFFF)),
    "lz4_cut": (Codec.LZ4, shuffled(bytes(100))[:-1]),
    "lz4_header_only": (Codec.LZ4, shuffled(bytes(100))[:12]),
    "zstd_shorter": (Codec.ZSTD, stream(zstandard.ZstdCompressor().compress(bytes(10)))),
    "lz4_shorter": (Codec.LZ4, shuffled(bytes(10))),
    "zstd_garbage": (Codec.ZSTD, stream(b"\xff" * 40)),
    "lz4_garbage": (Codec.LZ4, b"\xff" * 60),
    "plane_too_long": (Codec.ZSTD, stream(bytes(51))),
    "plane_beyond_the_end": (Codec.ZSTD, stream(bytes(50))[:-1]),
    "bytes_after_the_planes": (Codec.ZSTD, stream(bytes(50), tail=b"x")),
    "no_room_for_lengths": (Codec.ZSTD, bytes(7)),
    "empty": (Codec.ZSTD, b""),
    "empty_planes": (Codec.ZSTD, stream(b"", b"")),
    "none_wrong_length": (Codec.NONE, bytes(99)),
    "lossy": (Codec.INT8, bytes(60)),
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_stream_of_another_length_is_refused(name: str) -> None:
    kind, wire = BOMBS[name]
    out = bytearray(100)
    with pytest.raises(ProtocolError) as caught:
        codec.decode_into(kind, wire, 2, memoryview(out))
    assert caught.value.reason == "bad_codec_stream"


@given(st.sampled_from(PACKED), st.binary(max_size=300), st.integers(1, 300))
def test_any_stream_decodes_to_the_length_or_is_refused(kind: Codec, wire: bytes, nbytes: int) -> None:
    guarded = bytearray(nbytes + 16)
    with contextlib.suppress(ProtocolError):
        codec.decode_into(kind, wire, 2, memoryview(guarded)[:nbytes])
    assert not any(guarded[nbytes:])


@given(st.data())
def test_damaged_lz4_decodes_inside_its_place_or_is_refused(data: st.DataObject) -> None:
    raw = np.arange(1000, dtype=np.uint16).tobytes()
    wire = bytearray(shuffled(raw))
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    struct.pack_into("<I", wire, 4, len(raw))
    struct.pack_into("<I", wire, 12, len(wire))
    guarded = bytearray(len(raw) + 4096)
    with contextlib.suppress(ProtocolError):
        codec.decode_into(Codec.LZ4, wire, 2, memoryview(guarded)[: len(raw)])
    assert not any(guarded[len(raw) :])


SAMPLES = {
    Codec.LZ4: CodecSample(1.2, 500e6, 1800e6),
    Codec.ZSTD: CodecSample(1.48, 900e6, 1500e6),
}


@pytest.mark.parametrize(
    ("link_bytes_per_s", "lanes", "choice"),
    [
        (12.5e6, 1, Codec.ZSTD),  # 100 Mbit/s
        (125e6, 1, Codec.ZSTD),  # 1 Gbit/s
        (1250e6, 1, Codec.NONE),  # 10 Gbit/s: the encoder would be the bottleneck
        (1250e6, 8, Codec.ZSTD),  # with cores enough it is not
    ],
)
def test_choice_follows_link_and_codec_rates(link_bytes_per_s: float, lanes: int, choice: Codec) -> None:
    assert choose_codec(SAMPLES, link_bytes_per_s, lanes) is choice


def test_without_samples_nothing_is_encoded() -> None:
    assert choose_codec({}, 1e6, 4) is Codec.NONE


def test_a_codec_in_use_stays_until_another_is_clearly_better() -> None:
    close = {Codec.LZ4: CodecSample(1.4, 1e9, 1e9), Codec.ZSTD: CodecSample(1.48, 1e9, 1e9)}
    assert choose_codec(close, 1e8, 1, current=Codec.LZ4) is Codec.LZ4
    assert choose_codec(close, 1e8, 1) is Codec.ZSTD
    slight = {Codec.ZSTD: CodecSample(1.05, 1e9, 1e9)}
    assert choose_codec(slight, 1e8, 1) is Codec.NONE
    assert choose_codec(slight, 1e8, 1, current=Codec.ZSTD) is Codec.ZSTD
    assert choose_codec({Codec.ZSTD: CodecSample(0.99, 1e9, 1e9)}, 1e8, 1, current=Codec.ZSTD) is Codec.NONE


rates = st.floats(1e5, 1e11)


@given(
    st.dictionaries(st.sampled_from(PACKED), st.builds(CodecSample, st.floats(0.5, 10), rates, rates)),
    rates,
    st.integers(1, 64),
    st.sampled_from([Codec.NONE, *PACKED]),
)
def test_choice_is_never_estimated_slower_than_none(samples, link: float, lanes: int, current: Codec) -> None:
    choice = choose_codec(samples, link, lanes, current=current)
    if choice is not Codec.NONE:
        sample = samples[choice]
        rate = min(link * sample.ratio, sample.encode_bytes_per_s * lanes, sample.decode_bytes_per_s * lanes)
        assert rate > link
        assert choice is current or rate * WORTHWHILE > link
