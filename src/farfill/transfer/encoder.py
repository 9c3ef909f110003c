"""What becomes of a chunk's bytes before they leave: the codec of the moment, or the lossy form the operator asked for.

One per link; called on the connections' threads, which encode at the same time, while the kernel sends what they handed
over before. So encoding costs a transfer time only when the cores cannot keep up with the link.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Lock

from farfill.clock import Clock
from farfill.config.model import KVTransferConfig
from farfill.core.layout import DTYPE_BYTES, KVLayout, TensorLayout
from farfill.kv.codec import ChunkCodec, Codec, CodecSample
from farfill.kv.lossy import encode_lossy, row_groups
from farfill.transfer.adapt import CodecChooser, Stream

SAMPLE_BYTES = 256 * 1024
# Whatever disturbs a measurement only makes it slower, so the fastest round counts.
SAMPLE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """`wire` is what travels, in `codec`; `held` is what the receiver will hold: the raw bytes, unless it is lossy."""

    codec: Codec
    wire: bytes | bytearray | memoryview
    held: bytes | memoryview


class ChunkEncoder:
    """Thread-safe. `lanes` is how many cores may encode at once."""

    def __init__(self, config: KVTransferConfig, lanes: int, clock: Clock) -> None:
        self._fixed = None if config.compression == "auto" else Codec[config.compression.upper()]
        self._lossy = lossy_codec(config)
        self._clock = clock
        self._lock = Lock()
        self._chooser = CodecChooser(lanes)

    def encode(self, raw: memoryview, tensor: TensorLayout, offset: int, codec: ChunkCodec) -> EncodedChunk:
        """The chunk `raw` at byte `offset` of a piece of `tensor`. `codec` is the calling thread's."""
        groups = row_groups(tensor) if self._lossy is not None else None
        if self._lossy is not None and groups is not None:
            lossy = encode_lossy(self._lossy, raw, groups, offset)
            if lossy is not None:
                return EncodedChunk(self._lossy, *lossy)
        item_bytes = DTYPE_BYTES[tensor.dtype]
        chosen = self._fixed if self._fixed is not None else self._choose(raw, tensor, codec)
        used, wire = codec.encode(chosen, raw, item_bytes)
        return EncodedChunk(used, wire, raw)

    def sent(self, wire_bytes: int) -> None:
        """A chunk left."""
        with self._lock:
            self._chooser.sent(wire_bytes)

    def settled(self, wire_bytes: int, raw_bytes: int) -> None:
        """Wire bytes of chunks that left are no longer outstanding; the receiver holds `raw_bytes` of them."""
        with self._lock:
            self._chooser.settled(wire_bytes, raw_bytes, self._clock.now_s())

    def interrupted(self) -> None:
        """A connection broke."""
        with self._lock:
            self._chooser.interrupted()

    @property
    def link_bound(self) -> bool:
        """Whether nothing but the link holds chunks back, as far as is known."""
        with self._lock:
            return self._lossy is None and self._fixed in (None, Codec.NONE) and self._chooser.link_bound

    def _choose(self, raw: memoryview, tensor: TensorLayout, codec: ChunkCodec) -> Codec:
        stream = Stream(tensor.kind, tensor.dtype)
        with self._lock:
            wants_sample = self._chooser.wants_sample(stream, self._clock.now_s())
        if wants_sample:
            samples = measure_codecs(codec, raw, DTYPE_BYTES[tensor.dtype])
            with self._lock:
                self._chooser.sampled(stream, samples)
        with self._lock:
            return self._chooser.choose(stream, self._clock.now_s())


def lossy_codec(config: KVTransferConfig) -> Codec | None:
    """The lossy form rows travel in; None: all is lossless."""
    return None if config.lossy == "none" else Codec[config.lossy.upper()]


def lossy_form(config: KVTransferConfig, layout: KVLayout) -> str:
    """What to tell of KV of `layout` that was received: "int8" or "fp8"; empty when it is exact all the same."""
    codec = lossy_codec(config)
    return codec.name.lower() if codec is not None and any(row_groups(t) for t in layout.tensors) else ""


def measure_codecs(
    codec: ChunkCodec, sample: memoryview, item_bytes: int, limit_bytes: int = SAMPLE_BYTES
) -> dict[Codec, CodecSample]:
    """Ratio and speed of every lossless codec on the head of `sample`, on this core, now."""
    piece = sample[: max(1, min(len(sample), limit_bytes) // item_bytes) * item_bytes]
    return {kind: _measure(codec, kind, piece, item_bytes) for kind in (Codec.LZ4, Codec.ZSTD)}


def _measure(codec: ChunkCodec, kind: Codec, sample: memoryview, item_bytes: int) -> CodecSample:
    out = memoryview(bytearray(len(sample)))
    encode_s = decode_s = float("inf")
    wire_bytes = len(sample)
    for _ in range(SAMPLE_ROUNDS):
        start_s = time.perf_counter()
        used, wire = codec.encode(kind, sample, item_bytes)
        encoded_s = time.perf_counter()
        codec.decode_into(used, wire, item_bytes, out)
        encode_s = min(encode_s, encoded_s - start_s)
        decode_s = min(decode_s, time.perf_counter() - encoded_s)
        wire_bytes = len(wire)
    return CodecSample(len(sample) / wire_bytes, len(sample) / encode_s, len(sample) / decode_s)
