"""Queues whose mean wait is known, to hold simulated ones against.

A simulated mean over n requests scatters: waits hang together, so 40 000 requests before four servers are still 3 % off
now and then. The recursion below gives every wait of the same arrivals and services exactly and fast, so it serves as a
control variate: the simulated mean, less the recursion's over the same requests, plus the recursion's over many more.
Its expectation is that of the simulated mean; its scatter is that of the long run.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapreplace
from math import exp

import numpy as np

from farfill.planner.curves import Floats
from farfill.planner.lengths import Lengths
from farfill.planner.queueing import wait_in_pool
from farfill.simulator.traffic import generator

BATCHES = 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds; `error_s` is one standard error, by batch means of the long run."""

    mean_s: float
    error_s: float


def recursion_waits(arrivals_s: Floats, service_s: Floats, servers: int) -> Floats:
    """Each wait before `servers` that take whoever came first (Lindley 1952; Kiefer and Wolfowitz 1955)."""
    free = [0.0] * servers
    waits = np.empty(len(arrivals_s))
    for i, (at_s, lasts_s) in enumerate(zip(arrivals_s.tolist(), service_s.tolist(), strict=True)):
        first = free[0]
        start = max(first, at_s)
        waits[i] = start - at_s
        heapreplace(free, start + lasts_s)
    return waits


def poisson_queue(
    lengths: Lengths, s_per_token: float, rate_per_s: float, count: int, seed: int
) -> tuple[Floats, Floats]:
    """(arrivals, seconds of service) of `count` requests of a Poisson stream, drawn as the simulator draws them: the
    last token of a prompt is not prefilled."""
    gaps, sizes = generator(seed, 3), generator(seed, 1)
    cumulative = np.cumsum(lengths.weights)
    at = np.minimum(np.searchsorted(cumulative, sizes.random(count), side="right"), len(cumulative) - 1)
    tokens = np.maximum(1.0, np.rint(lengths.tokens[at]))
    return np.cumsum(gaps.exponential(1 / rate_per_s, count)), (tokens - 1) * s_per_token


def controlled(simulated: Floats, same: tuple[Floats, Floats], many: tuple[Floats, Floats], servers: int) -> Estimate:
    """The simulated mean wait with the recursion as its control. `same` are the arrivals and services that were
    simulated, in the order of `simulated`; `many` are others of the same kind."""
    long = recursion_waits(*many, servers)
    batches = np.array([part.mean() for part in np.array_split(long, BATCHES)])
    mean = float(simulated.mean() - recursion_waits(*same, servers).mean() + long.mean())
    return Estimate(mean, float(batches.std(ddof=1) / np.sqrt(BATCHES)))


def known_wait_s(lengths: Lengths, s_per_token: float, rate_per_s: float, servers: int) -> float:
    """Mean wait in closed form: M/M/c by Erlang and M/G/1 by Pollaczek and Khinchine, both exact; M/D/c by Crommelin
    (1932), exact; M/G/c otherwise by Kimura's interpolation of the two (1986), within about 1 %."""
    tokens = np.maximum(1.0, np.rint(lengths.tokens)) - 1
    mean = float((tokens * lengths.weights).sum()) * s_per_token
    square = float((tokens**2 * lengths.weights).sum()) * s_per_token**2
    scv = max(0.0, square / mean**2 - 1)
    exponential = wait_in_pool(rate_per_s, servers, mean, 1.0).overall_s
    if servers == 1:
        return exponential * (1 + scv) / 2
    constant = _deterministic_wait_s(rate_per_s, servers, mean)
    return (1 + scv) / (2 * scv / exponential + (1 - scv) / constant)


def _deterministic_wait_s(rate_per_s: float, servers: int, service_s: float) -> float:
    load = rate_per_s * service_s
    total, n = 0.0, 1
    while True:
        work, least = n * load, n * servers
        term = exp(-work)
        for j in range(1, least):
            term *= work / j
        at = term * work / least
        tail, j, each = 0.0, least, at
        while each > 1e-18:
            tail += each
            j += 1
            each *= work / j
        added = tail - servers / load * (tail - at)
        total += added
        if abs(added) < 1e-12:
            return service_s * total
        n += 1
