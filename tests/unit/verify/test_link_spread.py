"""The spread of a rate over windows of half a second."""

from __future__ import annotations

import pytest

from farfill.verify.link_spread import rate_spread


def samples(rates: list[float], start_s: float = 0.0) -> list[tuple[float, float]]:
    return [(start_s + 0.1 * (i + 1) - 0.01, rate) for i, rate in enumerate(rates)]


def test_steady_rate_has_no_spread_however_bursty_within_a_window() -> None:
    assert rate_spread(samples([0.0, 200.0, 100.0, 150.0, 50.0] * 6), 0.0, 3.0) == 0.0


def test_swinging_rate_has_the_interquartile_range_of_its_windows() -> None:
    rates = [rate for rate in (100.0, 200.0, 300.0, 400.0, 500.0) for _ in range(5)]
    assert rate_spread(samples(rates), 0.0, 2.5) == pytest.approx(200.0)


def test_only_what_lies_in_the_measurement_counts() -> None:
    before, after = [9000.0] * 10, [5000.0] * 3
    assert rate_spread(samples([*before, *[100.0] * 20, *after]), 1.0, 3.3) == 0.0


def test_too_few_windows_tell_nothing() -> None:
    assert rate_spread(samples([100.0] * 14), 0.0, 1.4) is None
    assert rate_spread([], 0.0, 3.0) is None
