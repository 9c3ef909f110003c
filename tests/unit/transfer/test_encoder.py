"""What becomes of chunks before they leave: codecs as set, `auto` after measuring, rows in the lossy form asked for."""

from __future__ import annotations

import numpy as np
import pytest

from farfill.config.model import KVTransferConfig
from farfill.core.layout import DTYPE_BYTES, KVLayout, TensorKind, TensorLayout
from farfill.kv.codec import ChunkCodec, Codec
from farfill.kv.lossy import decode_lossy_into, row_groups
from farfill.transfer.encoder import ChunkEncoder, lossy_form, measure_codecs

ROWS = TensorLayout(0, "k", TensorKind.FULL, "bfloat16", (2, 64))
STATE = TensorLayout(1, "state", TensorKind.RECURRENT, "float32", (4, 32, 32))
CODEC = ChunkCodec()


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def unix_s(self) -> float:
        return self.time_s


def encoder(clock: FakeClock | None = None, **settings: str) -> ChunkEncoder:
    return ChunkEncoder(KVTransferConfig(**settings), 2, clock or FakeClock())


def chunk(tensor: TensorLayout, nbytes: int = 1 << 20) -> memoryview:
    numbers = np.random.default_rng(0).standard_normal(nbytes // DTYPE_BYTES[tensor.dtype], dtype=np.float32)
    if tensor.dtype == "bfloat16":
        numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return memoryview(numbers.tobytes())


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("tensor", [ROWS, STATE])
def test_a_codec_that_is_set_is_used_and_what_is_held_is_the_raw_bytes(compression: str, tensor: TensorLayout) -> None:
    raw = chunk(tensor)
    encoded = encoder(compression=compression).encode(raw, tensor, 0, CODEC)
    assert encoded.codec is Codec[compression.upper()]
    assert encoded.held is raw


def test_auto_begins_plain_and_codes_once_the_plain_rate_is_known() -> None:
    clock = FakeClock()
    auto, raw = encoder(clock, compression="auto"), chunk(ROWS)
    chosen = []
    for _ in range(20):  # 10 MB/s: any codec pays
        encoded = auto.encode(raw, ROWS, 0, CODEC)
        chosen.append(encoded.codec)
        auto.sent(2 * len(encoded.wire))  # another one stays outstanding
        clock.time_s += len(encoded.wire) / 10e6
        auto.settled(len(encoded.wire), len(raw))
    assert chosen[0] is Codec.NONE
    assert chosen[-1] is Codec.ZSTD
    assert auto.link_bound


@pytest.mark.parametrize(("lossy", "codec"), [("int8", Codec.INT8), ("fp8", Codec.FP8)])
def test_rows_travel_in_the_lossy_form_and_what_is_held_is_what_it_decodes_to(lossy: str, codec: Codec) -> None:
    lossy_encoder = encoder(compression="zstd", lossy=lossy)
    raw = chunk(ROWS)
    encoded = lossy_encoder.encode(raw, ROWS, 96, CODEC)
    assert encoded.codec is codec
    out, groups = bytearray(len(raw)), row_groups(ROWS)
    assert groups is not None
    decode_lossy_into(codec, encoded.wire, groups, 96, memoryview(out))
    assert out == encoded.held != raw
    assert lossy_encoder.encode(chunk(STATE), STATE, 0, CODEC).codec is Codec.ZSTD
    assert not lossy_encoder.link_bound, "nobody knows how fast quantising is"


@pytest.mark.parametrize(
    ("lossy", "tensors", "told"),
    [("none", (ROWS, STATE), ""), ("int8", (ROWS, STATE), "int8"), ("fp8", (STATE,), "")],
)
def test_kv_is_told_to_be_lossy_when_some_of_it_may_be(
    lossy: str, tensors: tuple[TensorLayout, ...], told: str
) -> None:
    assert lossy_form(KVTransferConfig(lossy=lossy), KVLayout(tensors, 512)) == told


@pytest.mark.parametrize("nbytes", [1, 2, 3, 1001, 1 << 20])
def test_any_chunk_can_be_a_sample(nbytes: int) -> None:
    samples = measure_codecs(CODEC, chunk(ROWS)[:nbytes], 2)
    assert set(samples) == {Codec.LZ4, Codec.ZSTD}
    assert all(s.ratio >= 1 and s.encode_bytes_per_s > 0 and s.decode_bytes_per_s > 0 for s in samples.values())
