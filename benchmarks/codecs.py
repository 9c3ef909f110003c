"""Codecs on cache tensors of real models, by kind of tensor and dtype: ratio, encoding and decoding speed of one core.

A JSON line per model, kind, dtype and codec, in bytes of chunks as they leave (1 MiB), by the code that `auto` and
`farfill link` measure with. Two figures are required: zstd on the bfloat16 rows of SmolLM2. Needs torch and the models
`farfill model fetch` brings: smollm2 and gemma3.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence

from _common import Figures, note, note_machine
from _kv_sample import DTYPES, KVSample, kv_samples
from farfill.core.layout import DTYPE_BYTES
from farfill.kv.codec import ChunkCodec, Codec, CodecSample
from farfill.kv.lossy import decode_lossy_into, encode_lossy, row_groups
from farfill.transfer.encoder import SAMPLE_ROUNDS, measure_codecs

CHUNK_BYTES = 1024 * 1024
LOSSY = (Codec.INT8, Codec.FP8)
Line = dict[str, object]


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=12, help="chunks of each kind and dtype at most")
    arguments = parser.parse_args()
    note_machine()
    figures = Figures()
    for sample in kv_samples():
        for dtype in DTYPES:
            chunks = chunks_of(sample, dtype, arguments.chunks)
            for codec, measured in {**lossless(chunks, dtype), **lossy(sample, chunks, dtype)}.items():
                print(json.dumps(line(sample, dtype, codec, measured, sum(map(len, chunks)))), flush=True)
                if (sample.model, str(sample.kind), dtype, codec) == ("smollm2", "full", "bfloat16", Codec.ZSTD):
                    figures.at_least("zstd_ratio_bfloat16", measured.ratio, 1.467)
                    figures.at_least("zstd_encode_gb_per_s_bfloat16", measured.encode_bytes_per_s / 1e9, 0.7)
    return figures.exit_code


def chunks_of(sample: KVSample, dtype: str, most: int) -> list[memoryview]:
    """Chunks from all pieces alike, so that neither keys nor early layers count more."""
    pieces = sample.pieces(dtype)
    every = [piece[at : at + CHUNK_BYTES] for piece in pieces for at in range(0, len(piece), CHUNK_BYTES)]
    # Odd steps: an even one would take keys only.
    step = max(1, len(every) // most) | 1
    return every[::step][:most]


def lossless(chunks: Sequence[memoryview], dtype: str) -> dict[Codec, CodecSample]:
    """Every lossless codec over all chunks."""
    codec, width = ChunkCodec(), DTYPE_BYTES[dtype]
    measured = [measure_codecs(codec, chunk, width, CHUNK_BYTES) for chunk in chunks]
    return {kind: total([one[kind] for one in measured], chunks) for kind in measured[0]}


def lossy(sample: KVSample, chunks: Sequence[memoryview], dtype: str) -> dict[Codec, CodecSample]:
    """Both lossy forms, where they may be used."""
    groups = row_groups(sample.layout(dtype))
    if groups is None:
        return {}
    found: dict[Codec, CodecSample] = {}
    for kind in LOSSY:
        measured: list[CodecSample] = []
        for chunk in chunks:
            out = memoryview(bytearray(len(chunk)))
            encode_s = decode_s = float("inf")
            for _ in range(SAMPLE_ROUNDS):
                start_s = time.perf_counter()
                encoded = encode_lossy(kind, chunk, groups, 0)
                encoded_s = time.perf_counter()
                assert encoded is not None, "a cache of finite numbers"
                decode_lossy_into(kind, encoded[0], groups, 0, out)
                encode_s = min(encode_s, encoded_s - start_s)
                decode_s = min(decode_s, time.perf_counter() - encoded_s)
                wire_bytes = len(encoded[0])
            measured.append(CodecSample(len(chunk) / wire_bytes, len(chunk) / encode_s, len(chunk) / decode_s))
        found[kind] = total(measured, chunks)
    return found


def total(samples: Sequence[CodecSample], chunks: Sequence[memoryview]) -> CodecSample:
    """What the codec did to all chunks together."""

    def mean(rates: Iterable[float]) -> float:
        return sum(map(len, chunks)) / sum(len(chunk) / rate for chunk, rate in zip(chunks, rates, strict=True))

    return CodecSample(
        mean(sample.ratio for sample in samples),
        mean(sample.encode_bytes_per_s for sample in samples),
        mean(sample.decode_bytes_per_s for sample in samples),
    )


def line(sample: KVSample, dtype: str, codec: Codec, measured: CodecSample, raw_bytes: int) -> Line:
    """For the table."""
    return {
        "model": sample.model,
        "kind": str(sample.kind),
        "dtype": dtype,
        "codec": codec.name.lower(),
        "raw_bytes": raw_bytes,
        "ratio": round(measured.ratio, 3),
        "encode_gb_per_s": round(measured.encode_bytes_per_s / 1e9, 3),
        "decode_gb_per_s": round(measured.decode_bytes_per_s / 1e9, 3),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ImportError) as error:
        note(f"failed: {error}")
        sys.exit(1)
