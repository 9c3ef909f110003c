"""Waiting times against closed forms, and against queues that are played through."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from farfill.planner.queueing import erlang_c, moments, wait_in_pool


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_one_server_is_exact(load: float):
    mean_s = 2.0
    exponential = load * mean_s / (1 - load)
    assert wait_in_pool(load / mean_s, 1, mean_s, 1.0).overall_s == pytest.approx(exponential)
    assert wait_in_pool(load / mean_s, 1, mean_s, 0.0).overall_s == pytest.approx(exponential / 2)  # M/D/1


def test_erlang_c_is_the_textbooks():
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(10, 8.0) == pytest.approx(0.409180, abs=1e-6)
    load, servers = 8.0, 10
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    others = sum(load**n / math.factorial(n) for n in range(servers))
    assert erlang_c(servers, load) == pytest.approx(last / (others + last))


@pytest.mark.parametrize(("servers", "load"), [(3, 0.6), (4, 0.85)])
def test_skewed_service_is_close_to_a_queue_played_through(servers: int, load: float):
    random = np.random.default_rng(7)
    count = 200_000
    service = random.lognormal(0.0, 0.7, count)
    mean, scv = moments(service, np.full(count, 1.0))
    rate = load * servers / mean
    arrivals = np.cumsum(random.exponential(1 / rate, count))
    free = [0.0] * servers
    waits = np.empty(count)
    for i in range(count):
        start = max(float(arrivals[i]), heapq.heappop(free))
        waits[i] = start - arrivals[i]
        heapq.heappush(free, start + float(service[i]))
    told = wait_in_pool(rate, servers, mean, scv)
    assert told.overall_s == pytest.approx(float(waits.mean()), rel=0.06)
    assert told.share == pytest.approx(float((waits > 0).mean()), rel=0.06)
    late = told.mean_s * 3
    assert float(told.within(np.array([late]))[0]) == pytest.approx(float((waits <= late).mean()), abs=0.02)


def test_bursts_wait_longer_and_overload_for_ever():
    calm, bursty = (wait_in_pool(0.8, 1, 1.0, 1.0, arrival_scv=scv).overall_s for scv in (1.0, 4.0))
    assert bursty == pytest.approx(2.5 * calm)
    assert math.isinf(wait_in_pool(1.0, 1, 1.0, 1.0).overall_s)
    assert wait_in_pool(0.0, 1, 1.0, 1.0).overall_s == 0.0
    assert math.isinf(wait_in_pool(1.0, 0, 1.0, 1.0).overall_s)
