"""Profiles as tables that are fast to ask: prefill seconds by tokens, step seconds by batch and context. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from farfill.planner.profile import Profile

GRID = 2048


class PrefillTimes:
    """Seconds of one prompt alone, by its uncached tokens: straight lines between exact values on a fine grid."""

    def __init__(self, profile: Profile, longest_tokens: float) -> None:
        self._step = max(1.0, longest_tokens / GRID)
        grid = np.arange(GRID + 2, dtype=np.float64) * np.float64(self._step)
        self._seconds: list[float] = [float(s) for s in np.broadcast_to(profile.prefill_s(grid), grid.shape)]
        self.batch_speedup = profile.batch_speedup

    def alone_s(self, tokens: float) -> float:
        """Beyond the grid its last slope goes on."""
        place = tokens / self._step
        index = min(int(place), GRID)
        low = self._seconds[index]
        return low + (self._seconds[index + 1] - low) * (place - index)

    def points(self) -> tuple[tuple[float, float], ...]:
        """A few of the grid's (tokens, seconds), for policies that want a curve."""
        return tuple((i * self._step, self._seconds[i]) for i in range(0, GRID + 1, GRID // 32))


class StepTimes:
    """Seconds of one decode step."""

    def __init__(self, profile: Profile) -> None:
        self.max_batch = profile.max_batch
        self._contexts = sorted({point.context_tokens for point in profile.decode})
        self.flat = len(self._contexts) == 1
        """Whether steps depend on the batch alone."""
        self.alone = [profile.step_s(batch, self._contexts[0]) for batch in range(profile.max_batch + 1)]
        self._rows = [[profile.step_s(batch, c) for c in self._contexts] for batch in range(profile.max_batch + 1)]

    def seconds(self, batch: int, context_tokens: float) -> float:
        """Of `batch` sequences, at most `max_batch`, of this mean length. Straight lines, also beyond the ends."""
        row, contexts = self._rows[batch], self._contexts
        if self.flat:
            return row[0]
        index = min(max(bisect_right(contexts, context_tokens), 1), len(contexts) - 1)
        x0, x1, y0, y1 = contexts[index - 1], contexts[index], row[index - 1], row[index]
        return max(1e-9, y0 + (y1 - y0) * (context_tokens - x0) / (x1 - x0))


class Sizes:
    """Bytes of KV by prompt tokens, on a grid like `PrefillTimes`."""

    def __init__(self, bytes_at: Callable[[float], float], longest_tokens: float) -> None:
        self._step = max(1.0, longest_tokens / GRID)
        self._bytes = [bytes_at(i * self._step) for i in range(GRID + 2)]
        far = bytes_at(longest_tokens)
        half = bytes_at(longest_tokens / 2)
        self.per_token = max(0.0, (far - half) / (longest_tokens / 2))
        self.fixed = max(0.0, far - self.per_token * longest_tokens)

    def of(self, tokens: float) -> float:
        """Beyond the grid its last slope goes on."""
        place = tokens / self._step
        index = min(int(place), GRID)
        low = self._bytes[index]
        return low + (self._bytes[index + 1] - low) * (place - index)

    def points(self) -> tuple[tuple[float, float], ...]:
        """A few of the grid's (tokens, bytes)."""
        return tuple((i * self._step, self._bytes[i]) for i in range(0, GRID + 1, GRID // 32))
