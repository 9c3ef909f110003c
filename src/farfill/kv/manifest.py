"""The list of pieces one request's KV consists of; both sides derive it, neither trusts the other's.

A piece is a contiguous run of bytes with its own place in the layout: the rows of one growing tensor for one
prefill chunk, the last rows of one window, or one whole state. Pieces are ordered by the prefill chunk that
releases them, growing tensors first, so streaming in index order is streaming in compute order. Windows and states
belong to the last prefill chunk; with checkpoints, to every chunk that ends at one, as they were there.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

from farfill.core.errors import InvalidRequestError, ModelUnsupportedError
from farfill.core.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Piece:
    """`tensor` indexes `layout.tensors`; [start_token, end_token) is empty for states, at the token they stand at."""

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
    def checkpoint_pieces(self) -> tuple[Piece, ...]:
        """Windows and states as they were before the prompt's end: later tokens overwrite them in a cache."""
        tensors, last = self.layout.tensors, self.num_prefill_chunks - 1
        return tuple(p for p in self.pieces if p.prefill_chunk != last and not tensors[p.tensor].kind.grows)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes over every tensor's identity, dtype, shape and the cut into pieces."""
        h = blake2b(digest_size=32, person=b"farfill-manif-1")
        layout = self.layout
        h.update(
            repr((layout.version, layout.prefill_chunk_tokens, layout.checkpoint_tokens, self.num_tokens)).encode()
        )
        for t in layout.tensors:
            h.update(repr((t.layer, t.name, str(t.kind), t.dtype, t.row_shape, t.window_tokens, t.row_tokens)).encode())
        for p in self.pieces:
            h.update(repr((p.index, p.tensor, p.prefill_chunk, p.start_token, p.end_token, p.nbytes)).encode())
        return h.digest()

    def complete_prefix_tokens(self, held: Container[int]) -> int:
        """The longest prefix, in tokens, that `held` piece indices allow decode to continue from exactly.

        All rows and what stands at the prompt's end: `num_tokens`. Otherwise whole prefill chunks from the start;
        for layouts with windows or states, up to the last checkpoint that is there in full.
        """
        tensors, step = self.layout.tensors, self.layout.prefill_chunk_tokens
        complete = 0
        for chunk, group in enumerate(self.by_prefill_chunk):
            rows = [piece for piece in group if tensors[piece.tensor].kind.grows]
            states = [piece for piece in group if not tensors[piece.tensor].kind.grows]
            if not all(piece.index in held for piece in rows):
                break
            if self.layout.resumable or (states and all(piece.index in held for piece in states)):
                complete = min((chunk + 1) * step, self.num_tokens)
        return complete


def build_manifest(layout: KVLayout, num_tokens: int) -> Manifest:
    """The manifest of `num_tokens` (≥ 1) prompt tokens. Deterministic: equal inputs give equal pieces."""
    if num_tokens < 1:
        raise InvalidRequestError(f"a manifest needs at least 1 token, got {num_tokens}")
    step = layout.prefill_chunk_tokens
    for tensor in layout.tensors:
        if tensor.kind.grows and step % tensor.row_tokens:
            raise ModelUnsupportedError(
                f"prefill chunks of {step} tokens are no whole number of rows of {tensor.row_tokens} ({tensor.name})"
            )
    growing = [i for i, tensor in enumerate(layout.tensors) if tensor.kind.grows]
    others = [i for i, tensor in enumerate(layout.tensors) if not tensor.kind.grows]
    pieces: list[Piece] = []

    def add(tensor: int, chunk: int, start: int, end: int) -> None:
        rows = layout.tensors[tensor].rows(start, end)
        pieces.append(Piece(len(pieces), tensor, chunk, start, end, rows * layout.tensors[tensor].row_bytes))

    for chunk in range(-(-num_tokens // step)):
        start, end = chunk * step, min((chunk + 1) * step, num_tokens)
        for tensor in growing:
            add(tensor, chunk, start, end)
        if end == num_tokens or layout.can_continue_at(end):
            for tensor in others:
                add(tensor, chunk, *layout.kept_span(tensor, end))
    return Manifest(layout, num_tokens, tuple(pieces))
