"""Waiting in front of a pool of equal instances: M/G/c by Erlang's formula and the Allen-Cunneen correction. Pure.

Allen, "Probability, Statistics, and Queueing Theory", 2nd ed. 1990, sec. 5.4. Exact for M/M/c and M/G/1; elsewhere
within a few percent. The wait, when there is one, is taken as exponential, as it is in the limit of heavy traffic
(Kingman 1962).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from farfill.planner.curves import Floats


@dataclass(frozen=True, slots=True)
class Wait:
    """A request waits with probability `share`, then `mean_s` on average. Overloaded: for ever."""

    share: float
    mean_s: float

    @property
    def overall_s(self) -> float:
        """Mean over all requests."""
        return self.share * self.mean_s

    def within(self, seconds: Floats) -> Floats:
        """Probability of waiting at most `seconds` (0 below 0)."""
        if math.isinf(self.mean_s):
            return np.zeros_like(seconds)
        scale = self.mean_s if self.mean_s > 0 else 1e-12
        late = self.share * np.exp(-np.maximum(seconds, 0.0) / scale)
        return np.where(seconds < 0, 0.0, 1.0 - late)


NO_WAIT = Wait(0.0, 0.0)
FOR_EVER = Wait(1.0, math.inf)


def wait_in_pool(
    rate_per_s: float, servers: int, mean_s: float, service_scv: float, *, arrival_scv: float = 1.0
) -> Wait:
    """The wait for one of `servers`; `service_scv` and `arrival_scv` are squared coefficients of variation."""
    if rate_per_s <= 0 or mean_s <= 0:
        return NO_WAIT
    load = rate_per_s * mean_s
    if servers < 1 or load >= servers:
        return FOR_EVER
    share = erlang_c(servers, load)
    mean = mean_s / (servers - load) * (arrival_scv + service_scv) / 2
    return Wait(share, mean)


def erlang_c(servers: int, load: float) -> float:
    """Probability that all of `servers` are busy under `load` erlangs."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    busy = load / servers
    return blocked / (1 - busy * (1 - blocked))


def moments(seconds: Floats, weights: Floats) -> tuple[float, float]:
    """(mean, squared coefficient of variation) of service times."""
    total = float(weights.sum())
    if total <= 0:
        return 0.0, 0.0
    mean = float((seconds * weights).sum()) / total
    square = float((seconds**2 * weights).sum()) / total
    return mean, max(0.0, square / mean**2 - 1) if mean > 0 else 0.0
