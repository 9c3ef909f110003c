"""KV of one sequence that several processes work on: one buffer in shared memory, in the layout of the whole model.

Rank 0 reads and writes whole rows of it, as on one rank, so a transfer and the prefix cache know nothing of ranks, and
the other side may have another number of them. Each rank sees the heads it computes through strides. What several
ranks compute alike (latents, states, KV heads that are fewer than ranks) belongs to the first of them; the others
have copies of their own, which `attach` fills, since a rank may be ahead of another within a step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from farfill.core.layout import DTYPE_BYTES, KVLayout
from farfill.engine.memory import allocate_bytes
from farfill.engine.torch.kv import KVSpec, TorchKV


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of one tensor: heads [start, end), or all of a tensor that is not cut. `owned`: in the buffer."""

    start: int
    end: int
    owned: bool


def share(rank: int, ranks: int, heads: int, *, cut: bool) -> Share:
    """Rank `rank`'s part of a tensor of `heads` heads, `cut` by heads or not.

    Cut, `heads` divide among `ranks`, or the other way round.
    """
    if not cut:
        return Share(0, heads, owned=rank == 0)
    if heads >= ranks:
        each = heads // ranks
        return Share(rank * each, (rank + 1) * each, owned=True)
    first = rank * heads // ranks
    return Share(first, first + 1, owned=rank % (ranks // heads) == 0)


class SharedSpec(KVSpec):
    """The layout of the whole model, and which part of each tensor is this rank's. `cut` are tensors cut by heads."""

    def __init__(
        self, layout: KVLayout, rank: int, ranks: int, cut: frozenset[int], *, num_layers: int | None = None
    ) -> None:
        super().__init__(layout, torch.device("cpu"), num_layers=num_layers)
        self.rank = rank
        self.shares = self._shares(rank, ranks, cut)
        # Bytes of all ranks' own copies, per row of each tensor.
        self._copied = [0] * len(layout.tensors)
        for other in range(ranks):
            for index, part in enumerate(self._shares(other, ranks, cut)):
                tensor = layout.tensors[index]
                if not part.owned:
                    self._copied[index] += (part.end - part.start) * tensor.row_bytes // tensor.row_shape[0]

    def kv_bytes(self, capacity_tokens: int) -> int:
        """What one sequence takes at most on all ranks together."""
        copies = sum(
            self.rows(tensor, capacity_tokens) * nbytes
            for tensor, nbytes in zip(self.layout.tensors, self._copied, strict=True)
        )
        return super().kv_bytes(capacity_tokens) + copies

    @property
    def has_copies(self) -> bool:
        """Whether any rank has copies, which have to be filled before rows change."""
        return any(self._copied)

    def _shares(self, rank: int, ranks: int, cut: frozenset[int]) -> Sequence[Share]:
        return [
            share(rank, ranks, tensor.row_shape[0], cut=index in cut)
            for index, tensor in enumerate(self.layout.tensors)
        ]


class SharedKV(TorchKV):
    """One rank's view of a sequence. `buffer` is shared memory of `spec.buffer_bytes(capacity_tokens)`."""

    def __init__(self, spec: SharedSpec, capacity_tokens: int, buffer: npt.NDArray[np.uint8]) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.capacity_tokens = capacity_tokens
        super().__init__(spec, capacity_tokens, buffer=buffer)

    def attach(self, tokens: int) -> None:
        """Also fill this rank's copies."""
        for shared, copy in self._copies:
            copy.copy_(shared)
        super().attach(tokens)

    def follow(self, other: SharedKV) -> None:
        """Stand where `other` stands, whose shared bytes were copied already."""
        for (_, mine), (_, its) in zip(self._copies, other._copies, strict=True):
            mine.copy_(its)
        self.tokens, self.media = other.tokens, other.media
        for mine, its in zip(self.layers, other.layers, strict=True):
            if mine.rows is not None and its.rows is not None:
                mine.rows.copy_state(its.rows)

    def _array(self, index: int) -> torch.Tensor:
        """This rank's part as [rows, heads of this rank, ...]; of a state, all of it."""
        spec = self.spec
        assert isinstance(spec, SharedSpec)
        whole = super()._array(index)
        part = spec.shares[index]
        shared = whole[:, part.start : part.end]
        if part.owned:
            return shared
        nbytes = shared.numel() * DTYPE_BYTES[spec.layout.tensors[index].dtype]
        copy = torch.from_numpy(allocate_bytes(nbytes)).view(shared.dtype).view(shared.shape)
        self._copies.append((shared, copy))
        return copy


def shared_memory(nbytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
    """(file descriptor, buffer) of fresh memory without a name; its pages cost nothing until they are written."""
    descriptor = os.memfd_create("farfill-kv", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor, mapped(descriptor, nbytes)


def mapped(descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """The memory behind a descriptor, which may be closed afterwards."""
    return np.frombuffer(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED), np.uint8)
