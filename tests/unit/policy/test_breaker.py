from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.breaker import BreakerLimits, BreakerState, CircuitBreaker, Outcome

LIMITS = BreakerLimits(error_rate_limit=0.2, latency_p99_limit_ms=100, window_s=30, min_requests=5, open_s=10)
OK, BAD, NEUTRAL = Outcome.SUCCESS, Outcome.FAILURE, Outcome.NEUTRAL


def run(breaker: CircuitBreaker, outcome: Outcome, now_s: float, excess_ms: float = 0.0) -> None:
    breaker.end(outcome, now_s, probe=breaker.begin(now_s), excess_ms=excess_ms)


def opened(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(5):
        run(breaker, BAD, now_s)
    assert breaker.state(now_s) is BreakerState.OPEN
    return breaker


def test_errors_over_the_limit_open_it_but_not_before_enough_requests() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(4):
        run(breaker, BAD, 0)
    assert breaker.allows(0)
    run(breaker, BAD, 0)
    assert not breaker.allows(0)


def test_error_rate_at_the_limit_keeps_it_closed() -> None:
    breaker = CircuitBreaker(LIMITS)
    for outcome in (OK, OK, OK, OK, BAD):
        run(breaker, outcome, 0)
    assert breaker.state(0) is BreakerState.CLOSED


def test_old_failures_do_not_count() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(4):
        run(breaker, BAD, 0)
    for _ in range(5):
        run(breaker, OK, 31)
    assert breaker.state(31) is BreakerState.CLOSED


def test_latency_beyond_the_estimate_opens_it() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(4):
        run(breaker, OK, 0)
    run(breaker, OK, 0, excess_ms=100)
    assert breaker.allows(0)
    run(breaker, OK, 0, excess_ms=101)
    assert not breaker.allows(0)


def test_neutral_outcomes_never_count() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(100):
        run(breaker, NEUTRAL, 0, excess_ms=10_000)
    assert breaker.state(0) is BreakerState.CLOSED


def test_half_open_lets_one_probe_through_and_success_closes() -> None:
    breaker = opened()
    assert not breaker.allows(9.9)
    assert breaker.state(10) is BreakerState.HALF_OPEN
    assert breaker.allows(10)
    assert breaker.begin(10)
    assert not breaker.allows(10)
    breaker.end(OK, 11, probe=True)
    assert breaker.state(11) is BreakerState.CLOSED
    run(breaker, BAD, 11)
    assert breaker.allows(11)


def test_failed_probe_opens_again_for_the_whole_time() -> None:
    breaker = opened()
    assert breaker.begin(10)
    breaker.end(BAD, 12, probe=True)
    assert not breaker.allows(21.9)
    assert breaker.allows(22)


def test_withdrawn_probe_frees_the_place_for_the_next() -> None:
    breaker = opened()
    assert breaker.begin(10)
    breaker.end(NEUTRAL, 11, probe=True)
    assert breaker.allows(11)
    assert breaker.begin(11)


@pytest.mark.parametrize("outcome", [OK, BAD])
def test_requests_from_before_it_opened_change_nothing(outcome: Outcome) -> None:
    breaker = CircuitBreaker(LIMITS)
    late = breaker.begin(0)
    for _ in range(5):
        run(breaker, BAD, 0)
    breaker.end(outcome, 9, probe=late)
    assert breaker.state(9) is BreakerState.OPEN
    assert breaker.allows(10)


@given(st.lists(st.tuples(st.sampled_from(Outcome), st.floats(0, 20), st.floats(0, 300)), max_size=80))
def test_never_more_than_one_probe_and_never_stuck(steps: list[tuple[Outcome, float, float]]) -> None:
    breaker, now_s = CircuitBreaker(LIMITS), 0.0
    pending: list[tuple[Outcome, bool, float]] = []
    for outcome, wait_s, excess_ms in steps:
        now_s += wait_s
        if breaker.allows(now_s):
            pending.append((outcome, breaker.begin(now_s), excess_ms))
        assert sum(probe for _, probe, _ in pending) <= 1
        if len(pending) > 3:
            ended, probe, excess = pending.pop(0)
            breaker.end(ended, now_s, probe=probe, excess_ms=excess)
    for ended, probe, excess in pending:
        breaker.end(ended, now_s, probe=probe, excess_ms=excess)
    assert breaker.allows(now_s + LIMITS.open_s + 1)
