"""Several gateways, one breaker: counts add up, changes of state travel, nobody counts twice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.breaker import BreakerLimits, BreakerState, CircuitBreaker, Outcome, outcome_of
from farfill.policy.breaker_share import BreakerSnapshot

LIMITS = BreakerLimits(
    error_rate_limit=0.2, latency_p99_limit_ms=100, window_s=30, min_requests=6, open_s=10, half_open_probes=2
)
OK, BAD = Outcome.SUCCESS, Outcome.FAILURE


def run(breaker: CircuitBreaker, outcome: Outcome, now_s: float, excess_ms: float = 0.0) -> None:
    breaker.end(outcome, now_s, probe=breaker.begin(now_s), excess_ms=excess_ms)


def test_failures_of_all_gateways_together_open_it_everywhere():
    a, b = CircuitBreaker(LIMITS), CircuitBreaker(LIMITS)
    for _ in range(3):
        run(a, BAD, 0)
        run(b, BAD, 0)
    assert a.allows(1)
    assert b.allows(1)
    b.merge([("a", a.snapshot(1))], 1)
    assert b.state(1) is BreakerState.OPEN
    a.merge([("b", b.snapshot(2))], 2)
    assert a.state(2) is BreakerState.OPEN
    assert a.state(11) is BreakerState.HALF_OPEN  # of the time b opened at


def test_clocks_need_not_agree():
    a, b = CircuitBreaker(LIMITS), CircuitBreaker(LIMITS)
    for _ in range(6):
        run(a, BAD, 1000.0)
    b.merge([("a", a.snapshot(1004.0))], 50.0)
    assert b.state(50.0) is BreakerState.OPEN
    assert b.state(56.0) is BreakerState.HALF_OPEN


def test_heard_again_counts_once_and_old_news_fade():
    a, b = CircuitBreaker(LIMITS), CircuitBreaker(LIMITS)
    for _ in range(3):
        run(a, BAD, 0)
    for _ in range(10):
        b.merge([("a", a.snapshot(1))], 1)
    assert b.state(1) is BreakerState.CLOSED
    for _ in range(3):
        run(b, BAD, 40)
    assert b.state(40) is BreakerState.CLOSED


def test_all_probes_must_succeed_and_the_news_close_it_for_others():
    a, b = CircuitBreaker(LIMITS), CircuitBreaker(LIMITS)
    for _ in range(6):
        run(a, BAD, 0)
    b.merge([("a", a.snapshot(0))], 0)
    assert a.begin(10)
    assert a.begin(10)
    assert not a.allows(10)
    assert not a.begin(10)
    a.end(OK, 11, probe=True)
    assert a.state(11) is BreakerState.HALF_OPEN
    a.end(OK, 12, probe=True)
    assert a.state(12) is BreakerState.CLOSED
    b.merge([("a", a.snapshot(13))], 13)
    assert b.state(13) is BreakerState.CLOSED
    b.merge([("a", a.snapshot(14))], 14)
    a.merge([("b", b.snapshot(14))], 14)
    assert a.state(14) is b.state(14) is BreakerState.CLOSED


def test_failed_probe_of_one_opens_it_for_all():
    a, b = CircuitBreaker(LIMITS), CircuitBreaker(LIMITS)
    for _ in range(6):
        run(a, BAD, 0)
    b.merge([("a", a.snapshot(0))], 0)
    assert a.begin(10)
    a.end(BAD, 11, probe=True)
    b.merge([("a", a.snapshot(12))], 12)
    assert not b.allows(20.9)
    assert b.allows(21.1)


def test_slow_successes_add_up():
    a, b = CircuitBreaker(LIMITS), CircuitBreaker(LIMITS)
    for _ in range(4):
        run(a, OK, 0, excess_ms=10)
        run(b, OK, 0, excess_ms=10)
    run(b, OK, 0, excess_ms=101)
    assert b.allows(0)  # one slow of five: too few requests to tell
    b.merge([("a", a.snapshot(0))], 0)
    assert b.state(0) is BreakerState.OPEN  # one slow of nine: so is p99
    fresh = CircuitBreaker(LIMITS)
    fresh.merge([("a", a.snapshot(0))], 0)
    assert fresh.allows(0)


def test_overload_holds_back_but_is_no_failure():
    breaker = CircuitBreaker(LIMITS)
    for _ in range(20):
        breaker.end(Outcome.OVERLOAD, 0, probe=False, retry_after_s=3)
    assert breaker.state(0) is BreakerState.CLOSED
    assert not breaker.allows(2.9)
    assert breaker.overloaded_s(1) == 2
    assert breaker.allows(3)
    other = CircuitBreaker(LIMITS)
    other.merge([("a", breaker.snapshot(1))], 100)
    assert not other.allows(101.9)
    assert other.allows(102)
    breaker.end(Outcome.OVERLOAD, 10, probe=False, retry_after_s=1e9)
    assert breaker.overloaded_s(10) == 60


@pytest.mark.parametrize(
    ("status", "retry_after_s", "outcome"),
    [
        (200, None, OK),
        (400, None, Outcome.NEUTRAL),
        (404, None, Outcome.NEUTRAL),
        (422, None, Outcome.NEUTRAL),
        (408, None, BAD),
        (429, None, Outcome.OVERLOAD),
        (429, 1.0, Outcome.OVERLOAD),
        (503, 1.0, Outcome.OVERLOAD),
        (503, None, BAD),
        (500, None, BAD),
        (None, None, BAD),
    ],
)
def test_only_what_the_other_side_is_to_blame_for_counts(status, retry_after_s, outcome):
    assert outcome_of(status, retry_after_s) is outcome


steps = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2]),
        st.sampled_from(["ok", "bad", "slow", "neutral", "share"]),
        st.floats(0.0, 4.0),
    ),
    max_size=60,
)


@given(steps)
def test_any_history_keeps_the_promises(happened):
    breakers = [CircuitBreaker(LIMITS) for _ in range(3)]
    now_s, asked = 0.0, 0
    for who, what, pause_s in happened:
        now_s += pause_s
        mine = breakers[who]
        if what == "share":
            mine.merge([(str(i), b.snapshot(now_s)) for i, b in enumerate(breakers) if i != who], now_s)
            again = mine.snapshot(now_s)
            mine.merge([(str(i), b.snapshot(now_s)) for i, b in enumerate(breakers) if i != who], now_s)
            assert mine.snapshot(now_s) == again
            continue
        if not mine.allows(now_s):
            assert mine.state(now_s) is not BreakerState.CLOSED
            continue
        asked += 1
        outcome = {"ok": OK, "slow": OK, "bad": BAD, "neutral": Outcome.NEUTRAL}[what]
        run(mine, outcome, now_s, excess_ms=200 if what == "slow" else 0)
    for breaker in breakers:
        snapshot = breaker.snapshot(now_s)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=BreakerSnapshot) == snapshot
        assert all(count.total >= count.failed + count.slow >= 0 for _, count in snapshot.buckets)
        assert breaker.allows(now_s + 10.1)  # an open breaker always lets a probe through in the end


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0, 5)), max_size=80))
def test_counting_as_it_goes_equals_counting_the_window(happened):
    wide = BreakerLimits(error_rate_limit=1.0, latency_p99_limit_ms=100, window_s=20, min_requests=10_000, open_s=10)
    breaker, now_s, seen = CircuitBreaker(wide), 0.0, []
    for failed, slow, pause_s in happened:
        now_s += pause_s
        run(breaker, BAD if failed else OK, now_s, excess_ms=500 if slow else 0)
        seen.append((now_s, failed, slow and not failed))
    inside = [s for s in seen if s[0] > now_s - 20]
    total = [sum(c.total for _, c in breaker.snapshot(now_s).buckets), breaker._count]
    assert total[0] == len(inside) == breaker._count.total
    assert breaker._count.failed == sum(s[1] for s in inside)
    assert breaker._count.slow == sum(s[2] for s in inside)
