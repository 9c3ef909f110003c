"""Circuit breaker of one prefill instance, as a pure machine.

closed → open when, in the window, the error rate or the p99 of latency beyond its estimate is over the
limit. open → half-open after `open_s`: one probe goes through; its success closes, its failure opens again,
an outcome that says nothing about the instance frees the probe for the next request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from math import ceil


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Outcome(StrEnum):
    """How one far prefill ended, as far as the instance and its link are to blame."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"  # the client's fault, no capacity, or withdrawn: says nothing about health


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """Same names and meaning as `routing.circuit_breaker`."""

    error_rate_limit: float
    latency_p99_limit_ms: float
    window_s: float
    min_requests: int
    open_s: float


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    failed: bool
    excess_ms: float


class CircuitBreaker:
    """Ask `allows`, announce with `begin`, report exactly once per `begin` with `end`."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._samples: deque[_Sample] = deque()
        self._opened_s: float | None = None
        self._probe_out = False

    def state(self, now_s: float) -> BreakerState:
        """Where the machine stands at `now_s`."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now_s - self._opened_s >= self._limits.open_s else BreakerState.OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a request may go to the instance now. Changes nothing."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probe_out)

    def begin(self, now_s: float) -> bool:
        """A request goes out. True: it is the half-open probe; pass that back to `end`."""
        if self.state(now_s) is BreakerState.HALF_OPEN and not self._probe_out:
            self._probe_out = True
            return True
        return False

    def end(self, outcome: Outcome, now_s: float, *, probe: bool, excess_ms: float = 0.0) -> None:
        """The request ended. `excess_ms` is how much longer it took than estimated."""
        if probe:
            self._probe_out = False
            if outcome is Outcome.SUCCESS:
                self._opened_s = None
                self._samples.clear()
            elif outcome is Outcome.FAILURE:
                self._opened_s = now_s
            return
        # What went out before the breaker opened must neither close it nor prolong it.
        if outcome is Outcome.NEUTRAL or self._opened_s is not None:
            return
        self._samples.append(_Sample(now_s, outcome is Outcome.FAILURE, excess_ms))
        while self._samples[0].at_s <= now_s - self._limits.window_s:
            self._samples.popleft()
        if self._over_limit():
            self._opened_s = now_s
            self._samples.clear()

    def _over_limit(self) -> bool:
        total = len(self._samples)
        if total < self._limits.min_requests:
            return False
        if sum(s.failed for s in self._samples) / total > self._limits.error_rate_limit:
            return True
        excess = sorted(s.excess_ms for s in self._samples if not s.failed)
        return bool(excess) and excess[ceil(0.99 * len(excess)) - 1] > self._limits.latency_p99_limit_ms
