"""How fast one instance is: prefill time by length and batch, decode step time by batch and context, with sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from farfill.core.errors import ConfigError
from farfill.planner.curves import Curve, Floats, MonotoneCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """One measured decode step of `batch` sequences that are `context_tokens` long on average."""

    batch: int
    context_tokens: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of instance. `prefill` is one prompt alone; `batch_speedup` is how many times more tokens per second
    prefill reaches at its best batch. `max_batch` bounds decode (memory); `sources` say where figures come from."""

    name: str
    accelerator: str
    gpus_per_instance: int
    prefill: Curve | None
    decode: tuple[DecodePoint, ...]
    max_batch: int
    sources: tuple[str, ...]
    batch_speedup: float = 1.0

    @property
    def source(self) -> str:
        """All sources, in one line."""
        return "; ".join(self.sources)

    def prefill_s(self, tokens: Floats | float) -> Floats:
        """Seconds of prefill of one prompt alone. Raises ConfigError when the profile has no prefill."""
        if self.prefill is None:
            raise ConfigError(f"profile {self.name} has no prefill times, but its site prefills; add prefill")
        return self.prefill(tokens)

    def seconds_at(self, tokens: float) -> float:
        """Seconds of prefill of one prompt alone."""
        return float(self.prefill_s(tokens))

    def service_s(self, tokens: Floats | float) -> Floats:
        """Instance seconds one prompt costs when batches are as good as they get."""
        return self.prefill_s(tokens) / self.batch_speedup

    def step_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one decode step: by batch at each measured context, then by context; straight lines, and beyond
        the ends the nearest slope. Raises ConfigError when the profile has no decode."""
        if not self.decode:
            raise ConfigError(f"profile {self.name} has no decode steps, but its site decodes; add decode")
        by_context: dict[float, list[tuple[float, float]]] = {}
        for point in self.decode:
            by_context.setdefault(point.context_tokens, []).append((point.batch, point.step_s))
        across = [(context, _line(sorted(points), batch)) for context, points in sorted(by_context.items())]
        return max(1e-9, _line(across, context_tokens))

    def best_batch(self, step_limit_s: float, context_tokens: float) -> int:
        """The largest batch whose step takes at most `step_limit_s`; 0: not even one sequence."""
        low, high = 0, self.max_batch
        while low < high:
            middle = (low + high + 1) // 2
            if self.step_s(middle, context_tokens) <= step_limit_s * (1 + 1e-9):
                low = middle
            else:
                high = middle - 1
        return low


def batch_speedup(points: Sequence[tuple[float, int, float]], alone: Curve) -> float:
    """The most tokens per second of any (tokens, batch, seconds) over those of one prompt alone; at least 1."""
    gains = [batch * float(alone(tokens)) / seconds for tokens, batch, seconds in points if batch > 1]
    return max(1.0, *gains) if gains else 1.0


def curve_through(points: Sequence[tuple[float, float]]) -> MonotoneCurve:
    """A curve through (tokens, seconds), which must be sorted. Raises ConfigError where more tokens take less time."""
    for (low, before), (high, after) in pairwise(points):
        if after < before:
            raise ConfigError(
                f"prefill of {high:g} tokens takes {after:g} s, less than {before:g} s of {low:g} tokens;"
                " measure again, or leave one of them out"
            )
    return MonotoneCurve([p[0] for p in points], [p[1] for p in points])


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    if len(points) == 1:
        return points[0][1]
    x, y = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    i = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
    return float(y[i] + (y[i + 1] - y[i]) * (at - x[i]) / (x[i + 1] - x[i]))
