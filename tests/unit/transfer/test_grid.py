"""The cut into chunks: every byte once, and nothing but what the manifest has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import ProtocolError
from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.kv.manifest import build_manifest
from farfill.transfer.grid import ChunkGrid, pack_bitmap, propose_chunk_bytes, unpack_bitmap
from farfill.wire.frames import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES

LAYOUT = KVLayout(
    (
        TensorLayout(0, "k", TensorKind.FULL, "bfloat16", (5, 77)),
        TensorLayout(1, "s", TensorKind.RECURRENT, "float32", (300, 129)),
    ),
    prefill_chunk_tokens=100,
)


@given(st.integers(1, 700), st.integers(1, 4))
def test_chunks_cover_every_byte_once(num_tokens: int, units: int) -> None:
    manifest = build_manifest(LAYOUT, num_tokens)
    grid = ChunkGrid(manifest, units * MIN_CHUNK_BYTES)
    covered = dict.fromkeys(range(len(manifest.pieces)), 0)
    for index in range(grid.num_chunks):
        chunk = grid.chunk(index)
        assert chunk.offset == covered[chunk.piece]
        assert 0 < chunk.nbytes <= grid.chunk_bytes
        assert index in grid.of_piece(chunk.piece)
        assert grid.find(chunk.piece, chunk.offset, chunk.nbytes) == chunk
        covered[chunk.piece] += chunk.nbytes
    assert covered == {piece.index: piece.nbytes for piece in manifest.pieces}


@given(st.integers(-5, 50), st.integers(0, 1 << 40), st.integers(-1, 1 << 40))
def test_any_place_is_a_chunk_or_a_typed_error(piece: int, offset: int, nbytes: int) -> None:
    manifest = build_manifest(LAYOUT, 250)
    grid = ChunkGrid(manifest, MIN_CHUNK_BYTES)
    try:
        chunk = grid.find(piece, offset, nbytes)
    except ProtocolError:
        return
    assert chunk.offset + chunk.nbytes <= manifest.pieces[chunk.piece].nbytes


@pytest.mark.parametrize("chunk_bytes", [0, MIN_CHUNK_BYTES - 1, MIN_CHUNK_BYTES + 1, MAX_CHUNK_BYTES * 2])
def test_odd_chunk_sizes_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        ChunkGrid(build_manifest(LAYOUT, 10), chunk_bytes)


@given(st.integers(0, 1 << 40), st.integers(1, 64), st.integers(1 << 20, 256 << 20), st.none() | st.floats(1, 1e12))
def test_proposed_size_is_always_usable(total: int, connections: int, limit: int, rate: float | None) -> None:
    chunk_bytes = propose_chunk_bytes(total, connections, limit, rate)
    assert MIN_CHUNK_BYTES <= chunk_bytes <= limit
    ChunkGrid(build_manifest(LAYOUT, 1), chunk_bytes)


def test_slow_links_get_small_chunks() -> None:
    assert propose_chunk_bytes(1 << 30, 4, 32 << 20, None) == 4 << 20
    assert propose_chunk_bytes(1 << 30, 4, 32 << 20, 10e6) < 1 << 20


@given(st.integers(1, 200), st.data())
def test_bitmap_survives_the_round_trip(num_chunks: int, data: st.DataObject) -> None:
    chunks = data.draw(st.sets(st.integers(0, num_chunks - 1)))
    assert unpack_bitmap(pack_bitmap(chunks, num_chunks), num_chunks) == chunks


@pytest.mark.parametrize(("bitmap", "num_chunks"), [(b"", 1), (b"\0\0", 8), (b"\x10", 4)])
def test_bitmap_of_another_length_is_refused(bitmap: bytes, num_chunks: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_bitmap(bitmap, num_chunks)
