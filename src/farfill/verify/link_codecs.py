"""What the codecs do on this host, on bytes like those of a bf16 cache."""

from __future__ import annotations

import msgspec
import numpy as np

from farfill.kv.codec import ChunkCodec
from farfill.transfer.encoder import SAMPLE_BYTES, measure_codecs

_ITEM_BYTES = 2
_ROUNDS = 5


class CodecRates(msgspec.Struct, frozen=True, kw_only=True):
    """One codec: raw over wire bytes, and raw bytes per second of one core each way."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


def measure_here() -> dict[str, CodecRates]:
    """Rates by codec; the fastest of a few rounds, since whatever disturbs only slows down."""
    codec, sample = ChunkCodec(), _like_a_cache()
    rounds = [measure_codecs(codec, sample, _ITEM_BYTES) for _ in range(_ROUNDS)]
    return {
        kind.name.lower(): CodecRates(
            ratio=rounds[0][kind].ratio,
            encode_bytes_per_s=max(one[kind].encode_bytes_per_s for one in rounds),
            decode_bytes_per_s=max(one[kind].decode_bytes_per_s for one in rounds),
        )
        for kind in rounds[0]
    }


def _like_a_cache() -> memoryview:
    """Normally distributed bf16 numbers: their exponents compress about as those of keys and values do."""
    numbers = np.random.default_rng(0).standard_normal(SAMPLE_BYTES // _ITEM_BYTES, dtype=np.float32)
    return memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())
