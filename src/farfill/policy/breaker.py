"""Circuit breaker of one prefill instance or far site, as a pure machine.

closed → open when, in the window, the error rate or the p99 of latency beyond its estimate is over the limit. open →
half-open after `open_s`: `half_open_probes` probes go through; when all succeed it closes, the first failure opens it
again, an outcome that says nothing about the instance frees its probe for the next request.

Client errors never count. Overload (429, 503 with Retry-After) is no failure: it holds requests back for as long as
the instance asked. Gateways share what they saw: see `policy.breaker_share`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

import msgspec

from farfill.policy.breaker_share import BreakerSnapshot, Heard, WindowCount

SHARED_BUCKETS = 30
MAX_OVERLOAD_S = 60.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Outcome(StrEnum):
    """How one far prefill ended, as far as the instance and its link are to blame."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"  # the client's fault, no capacity, or withdrawn: says nothing about health
    OVERLOAD = "overload"  # it asked to be left alone for a while


def outcome_of(status: int | None, retry_after_s: float | None = None) -> Outcome:
    """What an HTTP answer says about who gave it; None: there was none (no connection, cut off, timed out)."""
    if status == 429 or (status == 503 and retry_after_s is not None):
        return Outcome.OVERLOAD
    if status is None or status >= 500 or status == 408:
        return Outcome.FAILURE
    return Outcome.SUCCESS if status < 400 else Outcome.NEUTRAL


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """Same names and meaning as `routing.circuit_breaker`."""

    error_rate_limit: float
    latency_p99_limit_ms: float
    window_s: float
    min_requests: int
    open_s: float
    half_open_probes: int = 1


class _Sample(msgspec.Struct, frozen=True):
    at_s: float
    failed: bool
    slow: bool


class CircuitBreaker:
    """Ask `allows`, announce with `begin`, report exactly once per `begin` with `end`."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._samples: deque[_Sample] = deque()
        self._count = WindowCount()
        self._heard: dict[str, Heard] = {}
        self._opened_s: float | None = None
        self._changed_s: float | None = None
        self._probes_out = 0
        self._probes_good = 0
        self._overloaded_until_s: float | None = None

    def state(self, now_s: float) -> BreakerState:
        """Where the machine stands at `now_s`."""
        if self._opened_s is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now_s - self._opened_s >= self._limits.open_s else BreakerState.OPEN

    def overloaded_s(self, now_s: float) -> float:
        """For how long yet the instance asked to be left alone; 0 if it did not."""
        return 0.0 if self._overloaded_until_s is None else max(0.0, self._overloaded_until_s - now_s)

    def allows(self, now_s: float) -> bool:
        """Whether a request may go to the instance now. Changes nothing."""
        if self._opened_s is None and self._overloaded_until_s is None:
            return True  # nearly always, and asked for every instance of every decision
        if self.overloaded_s(now_s) > 0:
            return False
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe_free)

    def begin(self, now_s: float) -> bool:
        """A request goes out. True: it is a half-open probe; pass that back to `end`."""
        if self._opened_s is not None and self.state(now_s) is BreakerState.HALF_OPEN and self._probe_free:
            self._probes_out += 1
            return True
        return False

    def end(
        self, outcome: Outcome, now_s: float, *, probe: bool, excess_ms: float = 0.0, retry_after_s: float = 1.0
    ) -> None:
        """The request ended. `excess_ms` is how much longer it took than estimated; `retry_after_s` with OVERLOAD."""
        if outcome is Outcome.OVERLOAD:
            until_s = now_s + min(max(retry_after_s, 0.0), MAX_OVERLOAD_S)
            self._overloaded_until_s = max(until_s, self._overloaded_until_s or until_s)
        if probe:
            self._end_probe(outcome, now_s)
            return
        # What went out before the breaker opened must neither close it nor prolong it.
        if outcome not in (Outcome.SUCCESS, Outcome.FAILURE) or self._opened_s is not None:
            return
        failed = outcome is Outcome.FAILURE
        slow = not failed and excess_ms > self._limits.latency_p99_limit_ms
        self._samples.append(_Sample(now_s, failed, slow))
        self._count = self._count.plus(1, failed, slow)
        self._forget_old(now_s)
        if self._over_limit(now_s):
            self._open(now_s)

    def snapshot(self, now_s: float) -> BreakerSnapshot:
        """What others may merge: ages instead of times, because clocks differ."""
        self._forget_old(now_s)
        width_s = self._limits.window_s / SHARED_BUCKETS
        buckets: dict[int, WindowCount] = {}
        for sample in self._samples:
            index = int((now_s - sample.at_s) / width_s)
            buckets[index] = buckets.get(index, WindowCount()).plus(1, sample.failed, sample.slow)
        return BreakerSnapshot(
            bucket_s=width_s,
            buckets=tuple((index, count) for index, count in sorted(buckets.items())),
            open=self._opened_s is not None,
            changed_age_s=None if self._changed_s is None else now_s - self._changed_s,
            overloaded_s=self.overloaded_s(now_s),
        )

    def merge(self, others: Iterable[tuple[str, BreakerSnapshot]], now_s: float) -> None:
        """Take in what other gateways saw: (name, snapshot) of each; it replaces what was heard of them before.

        Their counts are added to the window, and the latest change of state, theirs or ours, holds.
        """
        for name, snapshot in others:
            self._heard[name] = Heard(snapshot, now_s)
            if snapshot.overloaded_s > 0:
                until_s = now_s + min(snapshot.overloaded_s, MAX_OVERLOAD_S)
                self._overloaded_until_s = max(until_s, self._overloaded_until_s or until_s)
            if snapshot.changed_age_s is None:
                continue
            changed_s = now_s - snapshot.changed_age_s
            if self._changed_s is None or changed_s > self._changed_s:
                self._adopt(snapshot.open, changed_s)
        if self._opened_s is None and self._over_limit(now_s):
            self._open(now_s)

    @property
    def _probe_free(self) -> bool:
        return self._probes_out + self._probes_good < self._limits.half_open_probes

    def _end_probe(self, outcome: Outcome, now_s: float) -> None:
        self._probes_out = max(0, self._probes_out - 1)
        if self._opened_s is None:
            return  # another gateway's probes closed it meanwhile
        if outcome is Outcome.FAILURE:
            self._open(now_s)
        elif outcome is Outcome.SUCCESS and self.state(now_s) is BreakerState.HALF_OPEN:
            self._probes_good += 1
            if self._probes_good >= self._limits.half_open_probes:
                self._adopt(False, now_s)

    def _open(self, now_s: float) -> None:
        self._adopt(True, now_s)

    def _adopt(self, is_open: bool, changed_s: float) -> None:
        self._opened_s = changed_s if is_open else None
        self._changed_s = changed_s
        self._probes_good = 0
        self._samples.clear()
        self._count = WindowCount()
        # What others counted before the change is settled by it as well.
        for heard in self._heard.values():
            heard.settled_s = changed_s

    def _forget_old(self, now_s: float) -> None:
        while self._samples and self._samples[0].at_s <= now_s - self._limits.window_s:
            old = self._samples.popleft()
            self._count = self._count.plus(-1, old.failed, old.slow)

    def _over_limit(self, now_s: float) -> bool:
        count = self._count
        for heard in self._heard.values():
            count = count.add(heard.count(now_s, self._limits.window_s))
        if count.total < self._limits.min_requests:
            return False
        if count.failed / count.total > self._limits.error_rate_limit:
            return True
        timed = count.total - count.failed
        # p99 is over the limit exactly when more samples are than lie above the 99th percentile's rank.
        return count.slow > timed - ceil(0.99 * timed)
