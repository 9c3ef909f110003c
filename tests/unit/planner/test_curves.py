"""Curves through measured points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.errors import ConfigError
from farfill.planner.curves import MonotoneCurve, QuadraticCurve, fit_quadratic

STEPS = st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 10)), min_size=1, max_size=12)


@given(STEPS)
def test_monotone_curve_meets_its_points_and_never_falls(steps: list[tuple[float, float]]):
    x = np.cumsum([step for step, _ in steps])
    y = 0.1 + np.cumsum([rise for _, rise in steps])
    curve = MonotoneCurve(list(x), list(y))
    assert curve(x) == pytest.approx(y, rel=1e-9)
    seen = curve(np.linspace(0, x[-1] * 1.5, 400))
    assert np.all(np.diff(seen) >= -1e-9 * y[-1])


def test_monotone_curve_is_exact_for_straight_lines():
    curve = MonotoneCurve([0, 1, 5, 9], [1, 3, 11, 19])
    assert curve(np.array([0.5, 2.0, 7.0, 20.0])) == pytest.approx([2.0, 5.0, 15.0, 41.0])


def test_quadratic_fit_finds_the_quadratic():
    truth = QuadraticCurve(0.4, 3e-5, 1e-10)
    tokens = [1000.0, 8000.0, 32000.0, 128000.0, 500000.0]
    found = fit_quadratic(tokens, [float(truth(t)) for t in tokens])
    assert (found.fixed_s, found.per_token_s, found.per_token_squared_s) == pytest.approx((0.4, 3e-5, 1e-10), rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "seconds", "told"),
    [([1, 2], [1, 2], "at least 3 points"), ([1, 2, 3], [3, 1, 3], "falls or is negative")],
)
def test_quadratics_that_make_no_sense_are_refused(tokens: list[float], seconds: list[float], told: str):
    with pytest.raises(ConfigError, match=told):
        fit_quadratic(tokens, seconds)
