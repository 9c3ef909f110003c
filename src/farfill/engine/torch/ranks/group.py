"""What ranks say to each other within a step: sums and concatenations, always in the same order.

Sums add the ranks' parts in the order of the ranks, element by element. So a token gets the same bits alone and in a
batch, which an all-reduce does not promise: it may add each run of a tensor in another order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# Below this, one exchange of everything is quicker than two exchanges of parts.
_SMALL_BYTES = 1 << 16


class Lost(BaseException):
    """A rank is gone, and the engine with it. No Exception, which would end one request only."""


class RankGroup:
    """This process's place among the ranks, and the time it spent in exchanges, waiting included."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.exchange_s = 0.0
        self.exchanges = 0

    @classmethod
    def join(cls, rank: int, size: int, store: Path, timeout_s: float) -> RankGroup:
        """Meet the other ranks through the file `store`; no exchange takes longer than `timeout_s`."""
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), size),  # pyright: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        return cls(rank, size)

    @staticmethod
    def leave() -> None:
        """Forget the group. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, of its shape and type."""
        with self._exchange():
            return self._total(part)

    def concatenated(self, part: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
        """All ranks' `part` side by side in the last dimension, of which rank i has `widths[i]`."""
        padded = torch.nn.functional.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
        with self._exchange():
            gathered = self._gather(padded.view(-1)).view(self.size, *padded.shape)
        return torch.cat([rows[..., :width] for rows, width in zip(gathered, widths, strict=True)], dim=-1)

    def _total(self, part: torch.Tensor) -> torch.Tensor:
        flat = part.contiguous().view(-1)
        if flat.nbytes <= _SMALL_BYTES or flat.numel() % self.size:
            result = self._sum(self._gather(flat).view(self.size, -1))
        else:
            parts = torch.empty_like(flat)
            dist.all_to_all_single(parts, flat)
            result = self._gather(self._sum(parts.view(self.size, -1)))
        return result.view(part.shape)

    def _gather(self, flat: torch.Tensor) -> torch.Tensor:
        gathered = flat.new_empty(self.size * flat.numel())
        dist.all_gather_single(gathered, flat)
        return gathered

    @staticmethod
    def _sum(parts: torch.Tensor) -> torch.Tensor:
        """[ranks, elements] summed over ranks in float32, rounded once."""
        result = parts[0].float()
        for part in parts[1:]:
            result = result + part
        return result.to(parts.dtype)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Around an exchange; one that fails leaves the ranks in different places, so nothing can go on."""
        began_s = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            raise Lost(f"rank {self.rank} could not exchange results: {error}") from error
        self.exchange_s += time.perf_counter() - began_s
        self.exchanges += 1
