"""Token bucket, as a pure machine: the one meter of every rate limit and budget."""

from __future__ import annotations

from math import inf


class TokenBucket:
    """Fills at `rate_per_s` up to `burst`. A cost above `burst` passes a full bucket and leaves a debt."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        if rate_per_s < 0 or burst <= 0:
            raise ValueError(f"a bucket needs a rate of at least 0 and a burst above 0, got {rate_per_s} and {burst}")
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._level = burst
        self._at_s: float | None = None

    def resize(self, rate_per_s: float, burst: float, now_s: float) -> None:
        """Another rate and burst from now on. What is in it stays, debts too; nothing is filled up."""
        self.level(now_s)
        self.rate_per_s, self.burst = rate_per_s, burst
        self._level = min(self._level, burst)

    def level(self, now_s: float) -> float:
        """What is in it; negative while in debt."""
        if self._at_s is not None and now_s > self._at_s:
            self._level = min(self.burst, self._level + (now_s - self._at_s) * self.rate_per_s)
        if self._at_s is None or now_s > self._at_s:
            self._at_s = now_s
        return self._level

    def wait_s(self, cost: float, now_s: float) -> float:
        """Seconds until `cost` would pass; 0: now; inf: never."""
        missing = min(cost, self.burst) - self.level(now_s)
        if missing <= 1e-9 * self.burst:
            return 0.0
        return missing / self.rate_per_s if self.rate_per_s > 0 else inf

    def take(self, cost: float, now_s: float) -> bool:
        """Whether `cost` passed; it was taken then."""
        if self.wait_s(cost, now_s) > 0:
            return False
        self._level -= cost
        return True

    def give_back(self, amount: float, now_s: float) -> None:
        """What was taken and not used; or, negative, used and not taken."""
        self._level = min(self.burst, self.level(now_s) + amount)
