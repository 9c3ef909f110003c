"""What the far side has confirmed, and when it crossed the link: the goodput of a measurement.

A chunk counts once the other end has it, not when it is handed to the kernel, where much may wait. Chunks are large
against a short window, and on several connections they end at about the same time, so counting them where they end
would be wrong by several of them. A connection carries one after the other, though: what was just confirmed there has
crossed since the confirmation before, and is spread over that time.
"""

from __future__ import annotations

import statistics
from threading import Lock

# A comparison with a baseline must not call a change what a link's own rate swings over such windows.
WINDOW_S = 0.5
# Fewer windows tell nothing.
MIN_WINDOWS = 3


class Confirmations:
    """Thread-safe. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._latest_s: dict[int, float] = {}
        self._crossings: list[tuple[float, float, int]] = []

    def heard(self, connection: int, nbytes: int, now_s: float) -> None:
        """The far side confirmed a chunk. When the first one of a connection began to cross is not known: it is left
        out."""
        with self._lock:
            since_s = self._latest_s.get(connection)
            self._latest_s[connection] = now_s
            if since_s is not None:
                self._crossings.append((since_s, now_s, nbytes))

    def rates(self, start_s: float, end_s: float, windows: int = 1) -> list[float]:
        """Bytes per second in each of so many equal windows. What crosses the end counts once it was confirmed."""
        with self._lock:
            crossings = list(self._crossings)
        width_s = (end_s - start_s) / windows
        nbytes = [0.0] * windows
        for since_s, until_s, size in crossings:
            first = max(0, int((since_s - start_s) / width_s))
            last = min(windows - 1, int((until_s - start_s) / width_s))
            for window in range(first, last + 1):
                window_s = start_s + window * width_s
                inside_s = min(until_s, window_s + width_s) - max(since_s, window_s)
                if until_s > since_s:
                    nbytes[window] += size * max(0.0, inside_s) / (until_s - since_s)
                elif window_s <= until_s < window_s + width_s:
                    nbytes[window] += size
        return [each / width_s for each in nbytes]

    def spread(self, start_s: float, end_s: float) -> float | None:
        """Interquartile range of the rate over whole windows of half a second; None: too few windows."""
        windows = int((end_s - start_s) / WINDOW_S)
        if windows < MIN_WINDOWS:
            return None
        rates = self.rates(start_s, start_s + windows * WINDOW_S, windows)
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        return high - low
