"""Byte planes of a chunk's numbers: the compressible part of floats, apart from the part that is noise. Pure.

An item is rotated left by one bit before it is cut into bytes, so that the first byte of a bfloat16 or float32 is
its whole exponent and the sign goes to the end, among the mantissa's bits. Bytes of equal weight then stand together,
the most significant plane first. All loops are over blocks that stay in the CPU's cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]

# Small enough for the cache, and large enough that threads seldom hand the interpreter lock to each other.
BLOCK_BYTES = 256 * 1024
ENTROPY_SAMPLE = 4096
_WORDS = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class PlaneSplitter:
    """Splits and joins; holds scratch memory, so each thread needs its own."""

    def __init__(self) -> None:
        self._scratch = {width: np.empty((2, BLOCK_BYTES // width), dtype=word) for width, word in _WORDS.items()}

    def split(self, raw: Bytes, planes: Bytes) -> None:
        """Write the planes of `raw`, which is whole items, to `planes`: shape (item bytes, items)."""
        width, items = planes.shape
        if width == 1:
            np.copyto(planes[0], raw)
            return
        words: Words = raw.view(_WORDS[width])
        step = BLOCK_BYTES // width
        for start in range(0, items, step):
            block = words[start : start + step]
            turned, part = self._scratch[width][:, : len(block)]
            np.left_shift(block, 1, out=turned)
            np.right_shift(block, 8 * width - 1, out=part)
            np.bitwise_or(turned, part, out=turned)
            for plane in range(width):
                shift = 8 * (width - 1 - plane)
                source = np.right_shift(turned, shift, out=part) if shift else turned
                np.copyto(planes[plane, start : start + len(block)], source, casting="unsafe")

    def join(self, planes: list[Bytes], raw: Bytes) -> None:
        """The inverse: fill `raw` from one plane per byte of an item."""
        width = len(planes)
        if width == 1:
            np.copyto(raw, planes[0])
            return
        words: Words = raw.view(_WORDS[width])
        step = BLOCK_BYTES // width
        for start in range(0, len(words), step):
            block = words[start : start + step]
            turned, part = self._scratch[width][:, : len(block)]
            np.copyto(turned, planes[0][start : start + len(block)])
            for plane in planes[1:]:
                np.left_shift(turned, 8, out=turned)
                np.copyto(part, plane[start : start + len(block)])
                np.bitwise_or(turned, part, out=turned)
            np.right_shift(turned, 1, out=part)
            np.left_shift(turned, 8 * width - 1, out=turned)
            np.bitwise_or(turned, part, out=block)


def bits_per_byte(plane: Bytes) -> float:
    """Order-0 entropy of a sample taken all over `plane` (at least one byte)."""
    step = max(1, len(plane) // ENTROPY_SAMPLE)
    counts = np.bincount(plane[::step])
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
