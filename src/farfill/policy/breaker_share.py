"""What gateways tell each other about a breaker: counts by age, and when its state last changed. Pure.

Snapshots merge by addition and by "the latest change holds", so the order in which they arrive does not matter, and
one that arrives again replaces itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class WindowCount(msgspec.Struct, frozen=True):
    """Requests that say something about health; `slow` are successes beyond the latency limit."""

    total: int = 0
    failed: int = 0
    slow: int = 0

    def plus(self, step: int, failed: bool, slow: bool) -> WindowCount:
        """One request more (+1) or less (-1)."""
        return WindowCount(self.total + step, self.failed + step * failed, self.slow + step * slow)

    def add(self, other: WindowCount) -> WindowCount:
        """Both together."""
        return WindowCount(self.total + other.total, self.failed + other.failed, self.slow + other.slow)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSnapshot:
    """One gateway's view. `buckets` are (index, count): index i holds requests aged [i, i + 1) × `bucket_s`.

    `changed_age_s`: since when it is `open` (or closed again); None: it never changed. `overloaded_s`: for how long yet
    the instance asked to be left alone. Plain values throughout, so that msgspec writes it as it is.
    """

    bucket_s: float
    buckets: tuple[tuple[int, WindowCount], ...] = ()
    open: bool = False
    changed_age_s: float | None = None
    overloaded_s: float = 0.0


@dataclass(slots=True)
class Heard:
    """A snapshot and when it came. Requests before `settled_s` have had their effect on the state."""

    snapshot: BreakerSnapshot
    heard_s: float
    settled_s: float | None = None

    def count(self, now_s: float, window_s: float) -> WindowCount:
        """Requests of it that are still in the window at `now_s`."""
        oldest_s = now_s - window_s
        if self.settled_s is not None:
            oldest_s = max(oldest_s, self.settled_s)
        total = WindowCount()
        for index, count in self.snapshot.buckets:
            newest_s = self.heard_s - index * self.snapshot.bucket_s
            if newest_s - self.snapshot.bucket_s >= oldest_s:
                total = total.add(count)
        return total
