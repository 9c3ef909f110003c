"""Fallback budget and the token bucket under it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.budget import BudgetLimits, BudgetVerdict, FallbackBudget
from farfill.policy.tokens import TokenBucket

LIMITS = BudgetLimits(tokens_per_s=1000, burst_s=10, max_concurrent=2, itl_limit_s=0.2)


def test_tokens_run_out_and_come_back_and_the_answer_says_when():
    budget = FallbackBudget(LIMITS)
    assert budget.ask(9000, 0).granted
    budget.end(1.0, 0, 0)
    refused = budget.ask(3000, 0)
    assert (refused.verdict, refused.retry_after_s) == (BudgetVerdict.TOKENS, 2.0)
    assert budget.ask(3000, 2.0).granted
    assert budget.remaining_ratio(2.0) == 0.0


def test_prompt_above_the_burst_needs_a_full_bucket_and_leaves_a_debt():
    budget = FallbackBudget(LIMITS)
    assert budget.ask(30_000, 0).granted
    budget.end(1, 0, 0)
    assert budget.ask(1, 19.9).retry_after_s == pytest.approx(0.101)
    assert budget.ask(1, 20.1).granted


def test_unused_tokens_come_back():
    budget = FallbackBudget(LIMITS)
    assert budget.ask(10_000, 0).granted
    budget.end(0.5, 8000, 0)
    assert budget.ask(8000, 0).granted


def test_concurrency_is_bounded():
    budget = FallbackBudget(LIMITS)
    assert budget.ask(1, 0).granted
    assert budget.ask(1, 0).granted
    refused = budget.ask(1, 0)
    assert refused.verdict is BudgetVerdict.CONCURRENCY
    assert 0 < refused.retry_after_s <= 60
    budget.end(1, 0, 0)
    assert budget.ask(1, 0).granted


def test_guard_protects_running_streams_with_hysteresis():
    budget = FallbackBudget(LIMITS)
    budget.observe_itl(0.21)
    refused = budget.ask(1, 0)
    assert (refused.verdict, refused.retry_after_s) == (BudgetVerdict.ITL_GUARD, 2.0)
    assert budget.remaining_ratio(0) == 0.0
    budget.observe_itl(0.19)
    assert not budget.ask(1, 0).granted
    budget.observe_itl(0.16)
    assert budget.ask(1, 0).granted
    budget.observe_itl(0.3)
    budget.observe_itl(None)
    assert budget.ask(1, 0).granted


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5000), st.booleans()), max_size=60))
def test_never_more_than_the_rate_and_one_burst(asked):
    budget, now_s, granted, open_ = FallbackBudget(LIMITS), 0.0, 0, 0
    for pause_s, tokens, ends in asked:
        now_s += pause_s
        answer = budget.ask(tokens, now_s)
        assert answer.granted == (answer.retry_after_s == 0)
        if answer.granted:
            granted += tokens
            open_ += 1
        if ends and open_:
            budget.end(0.1, 0, now_s)
            open_ -= 1
        assert open_ <= 2
        assert granted <= 1000 * 10 + 1000 * now_s + 1e-3
        assert 0 <= budget.remaining_ratio(now_s) <= 1


@given(
    st.just(0.0) | st.floats(1e-3, 100),
    st.floats(1, 100),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 200)), max_size=30),
)
def test_bucket_waits_exactly_as_long_as_it_says(rate: float, burst: float, costs):
    bucket, now_s = TokenBucket(rate, burst), 0.0
    for pause_s, cost in costs:
        now_s += pause_s
        wait_s = bucket.wait_s(cost, now_s)
        if wait_s == 0:
            assert bucket.take(cost, now_s)
        elif wait_s < 1e6:
            assert not bucket.take(cost, now_s)
            now_s += wait_s * (1 + 1e-9)
            assert bucket.take(cost, now_s)
        else:
            assert rate == 0 or not math.isinf(wait_s)
            return
        assert bucket.level(now_s) <= burst
    with pytest.raises(ValueError, match="burst above 0"):
        TokenBucket(1, 0)
