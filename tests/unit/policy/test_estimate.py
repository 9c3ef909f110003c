from __future__ import annotations

import pytest

from farfill.policy.estimate import PrefillEstimator


def test_no_estimate_before_the_first_sample() -> None:
    assert PrefillEstimator().estimate_s(100) is None


def test_estimate_scales_with_tokens() -> None:
    estimator = PrefillEstimator()
    estimator.observe(100, 1.0)
    assert estimator.estimate_s(300) == pytest.approx(3.0)


def test_slowdown_shows_as_excess_long_before_it_becomes_the_estimate() -> None:
    estimator = PrefillEstimator()
    estimator.observe(100, 1.0)
    for _ in range(5):
        estimator.observe(100, 10.0)
    estimate = estimator.estimate_s(100)
    assert estimate is not None
    assert estimate < 4.0


def test_improvement_is_followed_quickly() -> None:
    estimator = PrefillEstimator()
    estimator.observe(100, 10.0)
    for _ in range(5):
        estimator.observe(100, 1.0)
    estimate = estimator.estimate_s(100)
    assert estimate is not None
    assert estimate < 1.5


def test_no_tokens_teach_nothing() -> None:
    estimator = PrefillEstimator()
    estimator.observe(0, 5.0)
    assert estimator.estimate_s(1) is None
