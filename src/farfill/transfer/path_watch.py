"""Sums what the kernel tells about each connection of a link into what happened on the link."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from farfill.transport.protocol import PathSample

PERIOD_S = 0.1
# A connection is stuck that moved less than this part of its share of the rate for so long.
STUCK_SHARE = 1 / 8
STUCK_S = 1.0


@dataclass(frozen=True, slots=True)
class PathChange:
    """What happened on all connections since the last one. `rtt_s` is the mean of connections now."""

    congestion: str
    rtt_s: float
    acked_bytes: int
    segments_sent: int
    segments_resent: int
    delivery_bytes_per_s: float


class PathWatch:
    """Not locked: the owner serialises calls."""

    def __init__(self) -> None:
        self._now: dict[int, PathSample] = {}
        self._progress: dict[int, deque[tuple[float, int]]] = {}
        self._taken_s = float("-inf")
        self._acked_bytes = self._sent = self._resent = 0

    def acked(self, wire_bytes: int) -> None:
        """The receiver confirmed so many."""
        self._acked_bytes += wire_bytes

    def sampled(self, connection: int, path: PathSample, now_s: float) -> None:
        """The latest of a connection."""
        progress = self._progress.setdefault(connection, deque())
        progress.append((now_s, path.confirmed_bytes))
        while len(progress) > 2 and now_s - progress[1][0] >= STUCK_S:
            progress.popleft()
        before = self._now.get(connection)
        self._sent += path.segments_sent - (before.segments_sent if before else 0)
        self._resent += path.segments_resent - (before.segments_resent if before else 0)
        self._now[connection] = path

    def gone(self, connection: int) -> None:
        """It is closed."""
        self._now.pop(connection, None)
        self._progress.pop(connection, None)

    def moves(self, connection: int, rate_bytes_per_s: float, now_s: float) -> bool | None:
        """Whether it gets bytes through, at a rate comparable to its share of the link's; None: nobody knows."""
        progress = self._progress.get(connection)
        if not progress or now_s - progress[-1][0] > STUCK_S or progress[-1][0] - progress[0][0] < STUCK_S:
            return None
        (first_s, first), (last_s, last) = progress[0], progress[-1]
        least = STUCK_SHARE * rate_bytes_per_s / len(self._progress)
        return (last - first) / (last_s - first_s) >= least

    def take(self, now_s: float) -> PathChange | None:
        """What changed since the last call; None when it is too early, or nothing is known."""
        if not self._now or now_s - self._taken_s < PERIOD_S:
            return None
        paths = list(self._now.values())
        change = PathChange(
            congestion=paths[0].congestion,
            rtt_s=sum(path.rtt_s for path in paths) / len(paths),
            acked_bytes=self._acked_bytes,
            segments_sent=self._sent,
            segments_resent=self._resent,
            delivery_bytes_per_s=sum(path.delivery_bytes_per_s for path in paths),
        )
        self._taken_s = now_s
        self._acked_bytes = self._sent = self._resent = 0
        return change
