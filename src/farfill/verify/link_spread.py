"""How much a link's own rate swings: what a comparison with a baseline must not call a change."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

WINDOW_S = 0.5
# Fewer windows tell nothing.
MIN_WINDOWS = 3


def rate_spread(samples: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float | None:
    """Interquartile range of the rate over windows of half a second, in the samples' unit; None: too few windows.

    `samples`: (when a sample ended in seconds, rate since the one before). What is left after the last whole window
    does not count.
    """
    windows: list[list[float]] = []
    for at_s, rate in samples:
        number = int((at_s - start_s) / WINDOW_S)
        if start_s < at_s <= end_s and number < int((end_s - start_s) / WINDOW_S):
            while len(windows) <= number:
                windows.append([])
            windows[number].append(rate)
    rates = [statistics.fmean(window) for window in windows if window]
    if len(rates) < MIN_WINDOWS:
        return None
    low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
    return high - low
