"""The list of pieces one request's KV consists of; both sides derive it, neither trusts the other's.

A piece is a contiguous run of bytes with its own place in the layout: the rows of one growing tensor for one
prefill chunk, the last rows of one window, or one whole state. Pieces are ordered by the prefill chunk that
releases them, so streaming in index order is streaming in compute order. Windows and states belong to the
last prefill chunk: earlier ones never leave.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from farfill.core.errors import InvalidRequestError
from farfill.core.layout import KVLayout, TensorKind


@dataclass(frozen=True, slots=True)
class Piece:
    """`tensor` indexes `layout.tensors`; [start_token, end_token) is empty for states."""

    index: int
    tensor: int
    prefill_chunk: int
    start_token: int
    end_token: int
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """All pieces of the KV of `num_tokens` prompt tokens under `layout`."""

    layout: KVLayout
    num_tokens: int
    pieces: tuple[Piece, ...] = field(repr=False)

    @cached_property
    def total_bytes(self) -> int:
        """Raw bytes of the whole set."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def num_prefill_chunks(self) -> int:
        """How many prefill chunks the prompt is computed in."""
        return -(-self.num_tokens // self.layout.prefill_chunk_tokens)

    @cached_property
    def by_prefill_chunk(self) -> tuple[tuple[Piece, ...], ...]:
        """Pieces grouped by the prefill chunk that releases them."""
        groups: list[list[Piece]] = [[] for _ in range(self.num_prefill_chunks)]
        for piece in self.pieces:
            groups[piece.prefill_chunk].append(piece)
        return tuple(tuple(group) for group in groups)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over every tensor's identity, dtype, shape and the cut into pieces."""
        h = blake2b(digest_size=32, person=b"farfill-manif-1")
        h.update(repr((self.layout.version, self.layout.prefill_chunk_tokens, self.num_tokens)).encode())
        for t in self.layout.tensors:
            h.update(repr((t.layer, t.name, str(t.kind), t.dtype, t.row_shape, t.window_tokens)).encode())
        for p in self.pieces:
            h.update(repr((p.index, p.tensor, p.prefill_chunk, p.start_token, p.end_token, p.nbytes)).encode())
        return h.digest()

    def complete_prefix_tokens(self, held: Container[int]) -> int:
        """The longest prefix, in tokens, that `held` piece indices allow decode to continue from exactly.

        All pieces: `num_tokens`. Otherwise whole prefill chunks from the start, and only for layouts without
        windows or states (those exist for the end of the prompt alone).
        """
        chunks = 0
        for group in self.by_prefill_chunk:
            if not all(piece.index in held for piece in group):
                break
            chunks += 1
        if chunks == self.num_prefill_chunks:
            return self.num_tokens
        return chunks * self.layout.prefill_chunk_tokens if self.layout.resumable else 0


def build_manifest(layout: KVLayout, num_tokens: int) -> Manifest:
    """The manifest of `num_tokens` (≥ 1) prompt tokens. Deterministic: equal inputs give equal pieces."""
    if num_tokens < 1:
        raise InvalidRequestError(f"a manifest needs at least 1 token, got {num_tokens}")
    step = layout.prefill_chunk_tokens
    chunks = -(-num_tokens // step)
    pieces: list[Piece] = []
    for chunk in range(chunks):
        start, end = chunk * step, min((chunk + 1) * step, num_tokens)
        for i, tensor in enumerate(layout.tensors):
            if tensor.kind.grows:
                span = (start, end)
            elif chunk != chunks - 1:
                continue
            elif tensor.kind is TensorKind.WINDOW:
                span = (max(0, num_tokens - tensor.window_tokens), num_tokens)
            else:
                span = (num_tokens, num_tokens)
            rows = span[1] - span[0] if tensor.kind not in (TensorKind.RECURRENT, TensorKind.CONV) else 1
            pieces.append(Piece(len(pieces), i, chunk, span[0], span[1], rows * tensor.row_bytes))
    return Manifest(layout, num_tokens, tuple(pieces))
