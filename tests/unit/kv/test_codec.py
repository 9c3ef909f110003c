"""Lossless codecs: exact round trips, bounded decoding, and a choice that never loses to `none`."""

from __future__ import annotations

import contextlib

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import ProtocolError
from farfill.kv.codec import WORTHWHILE, ChunkCodec, Codec, CodecSample, choose_codec

PACKED = [Codec.LZ4, Codec.ZSTD]
codec = ChunkCodec()


@given(st.sampled_from(list(Codec)), st.binary(min_size=1, max_size=5000), st.sampled_from([1, 2, 4, 8]))
def test_any_bytes_survive_the_round_trip(kind: Codec, raw: bytes, item_bytes: int) -> None:
    used, wire = codec.encode(kind, raw, item_bytes)
    assert len(wire) <= len(raw)
    out = bytearray(len(raw))
    codec.decode_into(used, wire, item_bytes, memoryview(out))
    assert out == raw


@pytest.mark.parametrize("kind", PACKED)
def test_bfloat16_caches_shrink_only_thanks_to_byte_planes(kind: Codec) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with_planes = len(codec.encode(kind, raw, 2)[1])
    without = len(codec.encode(kind, raw, 1)[1])
    assert with_planes < without
    assert len(raw) / with_planes > 1.15


@pytest.mark.parametrize("kind", PACKED)
def test_random_bytes_travel_raw(kind: Codec) -> None:
    raw = np.random.default_rng(0).bytes(1 << 16)
    used, wire = codec.encode(kind, raw, 2)
    assert used is Codec.NONE
    assert wire is raw


BOMB = bytes(1 << 24)
BOMBS = {
    "zstd_claims_more": (Codec.ZSTD, zstandard.ZstdCompressor().compress(BOMB)),
    "zstd_claims_nothing": (
        Codec.ZSTD,
        zstandard.ZstdCompressor(write_content_size=False).compress(BOMB),
    ),
    "lz4_expands": (Codec.LZ4, lz4.block.compress(BOMB, store_size=False)),
    "zstd_shorter": (Codec.ZSTD, zstandard.ZstdCompressor().compress(bytes(10))),
    "lz4_shorter": (Codec.LZ4, lz4.block.compress(bytes(10), store_size=False)),
    "zstd_garbage": (Codec.ZSTD, b"\xff" * 50),
    "lz4_garbage": (Codec.LZ4, b"\xff" * 50),
    "none_wrong_length": (Codec.NONE, bytes(99)),
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


SAMPLES = {
    Codec.LZ4: CodecSample(1.2, 250e6, 1500e6),
    Codec.ZSTD: CodecSample(1.46, 270e6, 1000e6),
}


@pytest.mark.parametrize(
    ("link_bytes_per_s", "lanes", "choice"),
    [
        (None, 4, Codec.NONE),  # not measured yet
        (0.0, 4, Codec.NONE),
        (12.5e6, 1, Codec.ZSTD),  # 100 Mbit/s
        (125e6, 1, Codec.ZSTD),  # 1 Gbit/s
        (1250e6, 1, Codec.NONE),  # 10 Gbit/s: the encoder would be the bottleneck
        (1250e6, 8, Codec.ZSTD),  # with cores enough it is not
    ],
)
def test_choice_follows_link_and_codec_rates(link_bytes_per_s: float | None, lanes: int, choice: Codec) -> None:
    assert choose_codec(SAMPLES, link_bytes_per_s, lanes) is choice


def test_without_samples_nothing_is_encoded() -> None:
    assert choose_codec({}, 1e6, 4) is Codec.NONE


rates = st.floats(1e5, 1e11)


@given(
    st.dictionaries(st.sampled_from(PACKED), st.builds(CodecSample, st.floats(0.5, 10), rates, rates)),
    rates,
    st.integers(1, 64),
)
def test_choice_is_never_estimated_slower_than_none(samples, link_bytes_per_s: float, lanes: int) -> None:
    choice = choose_codec(samples, link_bytes_per_s, lanes)
    if choice is not Codec.NONE:
        sample = samples[choice]
        cost = max(
            1 / (link_bytes_per_s * sample.ratio),
            1 / (sample.encode_bytes_per_s * lanes),
            1 / (sample.decode_bytes_per_s * lanes),
        )
        assert cost < WORTHWHILE / link_bytes_per_s
