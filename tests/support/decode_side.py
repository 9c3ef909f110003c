"""The decode side of a KV transfer as a process of its own: loads models, takes KV in CHUNK frames, decodes.

Run as a script it answers requests on stdin, each one line of JSON and then that many bytes, until stdin ends.
`DecodeSide` is the other end of that pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any

from blake3 import blake3
from xxhash import xxh3_128_digest

from farfill.core.layout import DTYPE_BYTES, KVLayout
from farfill.kv.codec import ChunkCodec, Codec
from farfill.kv.manifest import build_manifest
from farfill.transfer.grid import ChunkGrid
from farfill.wire.frames import (
    FLAG_CHECKSUM,
    HEADER_BYTES,
    MIN_CHUNK_BYTES,
    FrameHeader,
    FrameType,
    unpack_header,
)


class DecodeSide:
    """A running decode side; `with` ends it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def __enter__(self) -> DecodeSide:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()

    def decode(
        self, model: Path, chunk: int, tokens: int, kv: bytes, first: int, steps: int, position_offset: int = 0
    ) -> dict[str, Any]:
        """Decode `steps` tokens after the `tokens` that `kv` is of (see `chunk_frames`), beginning with `first`.

        `position_offset` is what the prompt's images do to positions. Answers with `fingerprint`, `tokens` and
        `logits`, a digest of all logits.
        """
        fields: dict[str, Any] = {"model": str(model), "chunk": chunk, "tokens": tokens, "first": first, "steps": steps}
        fields["position_offset"] = position_offset
        out, back = self._process.stdin, self._process.stdout
        assert out is not None
        assert back is not None
        out.write(json.dumps({**fields, "nbytes": len(kv)}).encode() + b"\n" + kv)
        out.flush()
        answer = json.loads(back.readline())
        assert "error" not in answer, answer["error"]
        return answer


def load(model: Path, chunk: int) -> Any:
    """A `LoadedModel` of a float32 model folder."""
    from farfill.config.model import ModelConfig
    from farfill.engine.torch.loader import load_model

    return load_model(model, ModelConfig.model_validate({"name": "tiny", "path": model, "dtype": "float32"}), chunk)


def greedy(executor: Any, rows: Sequence[tuple[Any, int]], steps: int) -> tuple[list[list[int]], str]:
    """Decode `steps` tokens of each (kv, next token) together: what each gave, and a digest of all logits."""
    digest = blake3()
    outputs: list[list[int]] = [[] for _ in rows]
    tokens = [token for _, token in rows]
    for _ in range(steps):
        logits = executor.decode([(kv, token) for (kv, _), token in zip(rows, tokens, strict=True)])
        digest.update(logits.tobytes())
        tokens = [int(row.argmax()) for row in logits]
        for output, token in zip(outputs, tokens, strict=True):
            output.append(token)
    return outputs, digest.hexdigest()


def chunk_frames(layout: KVLayout, kv: Any) -> bytes:
    """All of a sequence's KV as it travels between workers: encoded chunks, each behind its header."""
    manifest, codec, frames = build_manifest(layout, kv.tokens), ChunkCodec(), []
    grid = ChunkGrid(manifest, MIN_CHUNK_BYTES)
    for index in range(grid.num_chunks):
        chunk = grid.chunk(index)
        piece = manifest.pieces[chunk.piece]
        whole = kv.read(piece.tensor, piece.start_token, piece.end_token)
        raw = whole[chunk.offset : chunk.offset + chunk.nbytes]
        used, wire = codec.encode(Codec.ZSTD, raw, DTYPE_BYTES[layout.tensors[piece.tensor].dtype])
        header = FrameHeader(
            FrameType.CHUNK,
            piece=chunk.piece,
            offset=chunk.offset,
            raw_bytes=chunk.nbytes,
            wire_bytes=len(wire),
            codec=used,
            flags=FLAG_CHECKSUM,
            checksum=xxh3_128_digest(raw),
        )
        frames += [header.pack(), bytes(wire)]
    return b"".join(frames)


def fill_from_frames(layout: KVLayout, tokens: int, kv: Any, content: memoryview) -> None:
    """Put chunks into their places; all must be there, and right."""
    manifest, codec, chunks = build_manifest(layout, tokens), ChunkCodec(), 0
    grid = ChunkGrid(manifest, MIN_CHUNK_BYTES)
    while content:
        header, content = unpack_header(content[:HEADER_BYTES]), content[HEADER_BYTES:]
        chunk = grid.find(header.piece, header.offset, header.raw_bytes)
        piece = manifest.pieces[chunk.piece]
        whole = kv.place(piece.tensor, piece.start_token, piece.end_token)
        place = whole[chunk.offset : chunk.offset + chunk.nbytes]
        item_bytes = DTYPE_BYTES[layout.tensors[piece.tensor].dtype]
        codec.decode_into(Codec(header.codec), content[: header.wire_bytes], item_bytes, place)
        assert xxh3_128_digest(place) == header.checksum, f"chunk {chunk.index} is damaged"
        content, chunks = content[header.wire_bytes :], chunks + 1
    assert chunks == grid.num_chunks, f"{chunks} chunks came, the cut has {grid.num_chunks}"


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    while line := requests.readline():
        request = json.loads(line)
        content = memoryview(requests.read(request["nbytes"]))
        try:
            loaded = load(Path(request["model"]), request["chunk"])
            kv = loaded.executor.allocate(request["tokens"] + request["steps"])
            fill_from_frames(loaded.info.layout, request["tokens"], kv, content)
            kv.attach(request["tokens"])
            kv.media = SimpleNamespace(position_offset=request["position_offset"])
            outputs, digest = greedy(loaded.executor, [(kv, request["first"])], request["steps"])
            answer = {"fingerprint": loaded.info.fingerprint, "tokens": outputs[0], "logits": digest}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    _serve(sys.stdin.buffer, sys.stdout.buffer)
