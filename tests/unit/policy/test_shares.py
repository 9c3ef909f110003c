"""How gateways divide a rate: together never more than all of it, and nobody starts from nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.shares import FLOOR, rate_share

demands = st.lists(st.floats(0, 1e9), min_size=1, max_size=20)


@given(demands)
def test_parts_are_all_of_it_together(asked: list[float]) -> None:
    parts = [rate_share(own, [*asked[:i], *asked[i + 1 :]]) for i, own in enumerate(asked)]
    assert sum(parts) == pytest.approx(1.0)
    assert min(parts) >= FLOOR / len(asked) - 1e-12


@given(demands, st.integers(0, 19))
def test_more_demand_never_means_a_smaller_part(asked: list[float], at: int) -> None:
    others = asked[:at] + asked[at + 1 :]
    assert rate_share(5.0, others) <= rate_share(50.0, others) + 1e-12


def test_alone_has_all_and_idle_gateways_leave_theirs() -> None:
    assert rate_share(0.0, []) == 1.0
    assert rate_share(10.0, []) == 1.0
    assert rate_share(10.0, [0.0, 0.0, 0.0]) == pytest.approx(FLOOR / 4 + 1 - FLOOR)
    assert rate_share(0.0, [0.0]) == 0.5
