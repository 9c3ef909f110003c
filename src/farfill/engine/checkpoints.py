"""Windows and states at prefill-chunk boundaries before a prompt's end, each in a place of its own.

A cache keeps them only as they are now. So what is exported, or arrives, as it was at an earlier boundary lies here
until the export is released, or the generation has begun and the prefix cache has taken what it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from farfill.engine.executor import SequenceKV
from farfill.engine.memory import allocate_bytes
from farfill.kv.manifest import Manifest

ReadState = Callable[[int, int, int], memoryview]
"""(tensor, start_token, end_token) of a window or state → its bytes, as `SequenceKV.read`."""


class Checkpoints:
    """Buffers for all `manifest.checkpoint_pieces`; `nbytes` of memory in all."""

    def __init__(self, manifest: Manifest) -> None:
        self._pieces = manifest.checkpoint_pieces
        self._buffers = {piece.index: allocate_bytes(piece.nbytes) for piece in self._pieces}
        self.nbytes = checkpoint_bytes(manifest)
        self._there: set[int] = set()

    def buffer(self, piece: int) -> memoryview | None:
        """The writable place of a piece; None for a piece that lies in the cache itself."""
        found = self._buffers.get(piece)
        return None if found is None else found.data

    def capture(self, chunk: int, read: ReadState) -> None:
        """Copy what stands at the end of prefill chunk `chunk`, if that is a checkpoint."""
        for piece in self._pieces:
            if piece.prefill_chunk == chunk:
                self._buffers[piece.index].data[:] = read(piece.tensor, piece.start_token, piece.end_token)
                self._there.add(piece.index)

    def arrived(self, pieces: Collection[int]) -> None:
        """These are there in full; of others that were only asked for, nobody knows."""
        self._there.update(piece for piece in self._buffers if piece in pieces)

    def reader(self, tokens: int) -> ReadState | None:
        """Reads what stood after `tokens` tokens; None unless all of it is known to be there."""
        spans = {(p.tensor, p.start_token, p.end_token): p.index for p in self._pieces if p.end_token == tokens}
        if not spans or not self._there.issuperset(spans.values()):
            return None
        return lambda *span: self._buffers[spans[span]].data.toreadonly()

    def copy_into(self, kv: SequenceKV, tokens: int) -> None:
        """Put what stood after `tokens` tokens into its places in `kv`."""
        for piece in self._pieces:
            if piece.end_token == tokens:
                kv.place(piece.tensor, piece.start_token, piece.end_token)[:] = self._buffers[piece.index].data


def checkpoint_bytes(manifest: Manifest) -> int:
    """Memory the checkpoints of a prompt take."""
    return sum(piece.nbytes for piece in manifest.checkpoint_pieces)
