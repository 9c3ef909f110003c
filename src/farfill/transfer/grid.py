"""How pieces are cut into chunks. Pure: the cut follows from the manifest and the agreed chunk size alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from farfill.core.errors import ProtocolError
from farfill.kv.manifest import Manifest
from farfill.wire.frames import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES

# Beyond this a chunk only delays: acknowledgements, stealing, and the interpreter while it is encoded.
PREFERRED_MAX_BYTES = 4 * 1024 * 1024
CHUNKS_PER_CONNECTION = 8
# Chunks this long on the line, all connections together: at the end of a transfer one connection has one left.
CHUNK_S = 0.04


@dataclass(frozen=True, slots=True)
class Chunk:
    """`nbytes` raw bytes at `offset` in piece `piece`; `index` counts over the whole transfer."""

    index: int
    piece: int
    offset: int
    nbytes: int


class ChunkGrid:
    """Every chunk of a manifest, numbered in piece order."""

    def __init__(self, manifest: Manifest, chunk_bytes: int) -> None:
        """Raises ProtocolError for a chunk size out of bounds."""
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES or chunk_bytes % MIN_CHUNK_BYTES:
            raise ProtocolError(f"{chunk_bytes} is no chunk size", reason="bad_chunk_size")
        self.chunk_bytes = chunk_bytes
        self._pieces = manifest.pieces
        self._first: list[int] = []
        total = 0
        for piece in manifest.pieces:
            self._first.append(total)
            total += -(-piece.nbytes // chunk_bytes)
        self.num_chunks = total

    def of_piece(self, piece: int) -> range:
        """Chunk numbers of a piece."""
        first = self._first[piece]
        return range(first, first + -(-self._pieces[piece].nbytes // self.chunk_bytes))

    def chunk(self, index: int) -> Chunk:
        """Chunk number `index`."""
        piece = bisect_right(self._first, index) - 1
        offset = (index - self._first[piece]) * self.chunk_bytes
        return Chunk(index, piece, offset, min(self.chunk_bytes, self._pieces[piece].nbytes - offset))

    def find(self, piece: int, offset: int, nbytes: int | None = None) -> Chunk:
        """The chunk at that place. Raises ProtocolError when the cut has none there, or of another length."""
        if not 0 <= piece < len(self._pieces) or offset % self.chunk_bytes or offset >= self._pieces[piece].nbytes:
            raise ProtocolError(f"no chunk at offset {offset} of piece {piece}", reason="bad_chunk")
        chunk = self.chunk(self._first[piece] + offset // self.chunk_bytes)
        if nbytes is not None and nbytes != chunk.nbytes:
            raise ProtocolError(f"chunk {chunk.index} has {chunk.nbytes} bytes, not {nbytes}", reason="bad_chunk")
        return chunk


def propose_chunk_bytes(total_bytes: int, connections: int, limit_bytes: float, rate_bytes_per_s: float | None) -> int:
    """A chunk size for a transfer: a few chunks per connection, each short on the wire, at most `limit_bytes`."""
    wanted = min(total_bytes // (connections * CHUNKS_PER_CONNECTION), int(min(PREFERRED_MAX_BYTES, limit_bytes)))
    if rate_bytes_per_s is not None:
        wanted = min(wanted, int(rate_bytes_per_s * CHUNK_S / connections))
    return max(MIN_CHUNK_BYTES, wanted // MIN_CHUNK_BYTES * MIN_CHUNK_BYTES)


def pack_bitmap(chunks: AbstractSet[int], num_chunks: int) -> bytes:
    """Little-endian bitmap: bit i of byte j is chunk 8 j + i."""
    bitmap = bytearray(-(-num_chunks // 8))
    for chunk in chunks:
        bitmap[chunk >> 3] |= 1 << (chunk & 7)
    return bytes(bitmap)


def unpack_bitmap(bitmap: bytes, num_chunks: int) -> set[int]:
    """The inverse. Raises ProtocolError unless the bitmap has exactly that many bits."""
    if len(bitmap) != -(-num_chunks // 8) or (num_chunks % 8 and bitmap[-1] >> (num_chunks % 8)):
        raise ProtocolError(f"a bitmap of {len(bitmap)} bytes for {num_chunks} chunks", reason="bad_bitmap")
    return {i for i in range(num_chunks) if bitmap[i >> 3] >> (i & 7) & 1}
