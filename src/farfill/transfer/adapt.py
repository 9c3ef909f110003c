"""Picks the codec of a link while it works: samples, tries, measures what really came out, and corrects itself.

Every so often the codecs are sampled on real bytes and chunks travel plain until the plain rate is known. Then the
best estimate is tried; if the receiver confirms fewer raw bytes per second than it did plain, the estimate
was wrong (an encoder competes with the engine for cores) and chunks travel plain again.
"""

from __future__ import annotations

import time

from farfill.kv.codec import ChunkCodec, Codec, CodecSample, choose_codec
from farfill.topology.estimate import MIN_WINDOW_BYTES, MIN_WINDOW_S, SmoothedValue

SAMPLE_BYTES = 256 * 1024
SAMPLE_EVERY_S = 30.0


class CodecChooser:
    """Not locked: the owner serialises calls. `lanes` is how many cores may encode at once."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._samples: dict[Codec, CodecSample] = {}
        self._sampled_s = float("-inf")
        self._achieved: dict[Codec, SmoothedValue] = {}
        self._window_codec: Codec | None = None
        self._window_start_s: float | None = None
        self._window_bytes = 0

    def wants_sample(self, now_s: float) -> bool:
        """Whether the caller shall measure the codecs on its bytes; asked once per period."""
        if now_s - self._sampled_s < SAMPLE_EVERY_S:
            return False
        self._sampled_s = now_s
        return True

    def sampled(self, samples: dict[Codec, CodecSample]) -> None:
        """New samples; what was achieved before no longer counts."""
        self._samples = samples
        self._achieved = {}

    def choose(self, link_bytes_per_s: float | None) -> Codec:
        """The codec of the next chunk."""
        plain = self._achieved.get(Codec.NONE)
        if plain is None:
            return Codec.NONE
        achieved = {codec: rate.value for codec, rate in self._achieved.items() if rate.value is not None}
        return choose_codec(self._samples, link_bytes_per_s, self._lanes, achieved)

    def sent(self, codec: Codec, now_s: float) -> None:
        """A chunk left in `codec`. A window with two codecs says nothing about either."""
        if self._window_start_s is None or codec is not self._window_codec:
            self._window_codec, self._window_start_s, self._window_bytes = codec, now_s, 0

    def confirmed(self, raw_bytes: int, now_s: float, *, still_busy: bool) -> None:
        """The receiver holds `raw_bytes` more; `still_busy`: more is outstanding."""
        if self._window_start_s is None or self._window_codec is None:
            return
        self._window_bytes += raw_bytes
        elapsed = now_s - self._window_start_s
        if elapsed >= MIN_WINDOW_S and self._window_bytes >= MIN_WINDOW_BYTES:
            self._achieved.setdefault(self._window_codec, SmoothedValue()).add(self._window_bytes / elapsed)
            self._window_start_s, self._window_bytes = now_s, 0
        if not still_busy:
            self._window_start_s = None


def measure_codecs(codec: ChunkCodec, sample: memoryview, item_bytes: int) -> dict[Codec, CodecSample]:
    """Ratio and speed of every codec on the head of `sample`, on this core, now."""
    piece = sample[: max(1, min(len(sample), SAMPLE_BYTES) // item_bytes) * item_bytes]
    return {kind: _measure(codec, kind, piece, item_bytes) for kind in (Codec.LZ4, Codec.ZSTD)}


def _measure(codec: ChunkCodec, kind: Codec, sample: memoryview, item_bytes: int) -> CodecSample:
    start_s = time.perf_counter()
    used, wire = codec.encode(kind, sample, item_bytes)
    encoded_s = time.perf_counter()
    codec.decode_into(used, wire, item_bytes, memoryview(bytearray(len(sample))))
    decoded_s = time.perf_counter()
    return CodecSample(
        len(sample) / len(wire), len(sample) / (encoded_s - start_s), len(sample) / (decoded_s - encoded_s)
    )
