"""Who may still take a chunk when a transfer comes to its end. Pure.

On a path with loss each connection goes at its own pace: one whose window has just collapsed needs ten times as long
for a chunk as the others. In the middle of a transfer that costs nothing, since it takes fewer chunks. The last chunk
it takes ends the transfer, though: so it leaves the last ones to the others (compare ECF: Lim, Nahum, Towsley, Gibbens,
2017).
"""

from __future__ import annotations

from statistics import median_low

# Slower than this part of the middle one of the connections: it leaves the last chunks to others.
SLOW_PART = 0.5
# Should nobody take one for so many round trips, anybody may: those faster ones may be stuck.
YIELD_ROUND_TRIPS = 1.0
YIELD_MIN_S = 0.01


class LastChunks:
    """Not locked: the owner serialises calls."""

    def __init__(self) -> None:
        self._windows: dict[int, float] = {}
        self._slow_below = 0.0
        self._taken_s = float("-inf")

    def sampled(self, connection: int, window_bytes_per_s: float) -> None:
        """What the congestion window of a connection allows now; 0: unknown."""
        self._windows[connection] = window_bytes_per_s
        self._slow_below = SLOW_PART * median_low(self._windows.values())

    def gone(self, connection: int) -> None:
        """It is closed."""
        self._windows.pop(connection, None)
        self._slow_below = SLOW_PART * median_low(self._windows.values()) if self._windows else 0.0

    def taken(self, now_s: float) -> None:
        """Somebody took a chunk."""
        self._taken_s = now_s

    def leaves(self, connection: int, chunks_waiting: int, rtt_s: float, now_s: float) -> bool:
        """Whether it had better leave those few to others."""
        if chunks_waiting > len(self._windows) or now_s - self._taken_s > max(YIELD_MIN_S, YIELD_ROUND_TRIPS * rtt_s):
            return False
        window = self._windows.get(connection, 0.0)
        return 0.0 < window < self._slow_below
