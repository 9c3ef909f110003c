"""Link estimates: busy windows only, lower bounds never lower them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.topology.estimate import LinkEstimate, SmoothedValue

MIB = 1024 * 1024


def drive(estimate: LinkEstimate, rate_bytes_per_s: float, start_s: float, *, at_full_rate: bool = True) -> float:
    """One second of a busy link; the time afterwards."""
    for step in range(10):
        estimate.busy(start_s + step * 0.1, at_full_rate=at_full_rate)
        estimate.acknowledged(int(rate_bytes_per_s / 10), start_s + (step + 1) * 0.1, still_busy=step < 9)
    return start_s + 1.0


def test_nothing_is_known_before_the_first_window() -> None:
    estimate = LinkEstimate()
    assert (estimate.rate_bytes_per_s, estimate.rtt_s, estimate.transfer_s(MIB)) == (None, None, None)
    estimate.busy(0.0)
    estimate.acknowledged(1000, 0.01, still_busy=False)
    assert estimate.rate_bytes_per_s is None, "too short and too little to say anything"


def test_busy_link_is_measured_and_idle_time_does_not_count() -> None:
    estimate = LinkEstimate()
    after_s = drive(estimate, 100 * MIB, 0.0)
    drive(estimate, 100 * MIB, after_s + 3600)
    assert estimate.rate_bytes_per_s == pytest.approx(100 * MIB, rel=0.01)
    estimate.round_trip(0.03)
    assert estimate.transfer_s(200 * MIB) == pytest.approx(2.03, rel=0.01)


def test_encoder_bound_windows_raise_the_estimate_but_never_lower_it() -> None:
    estimate = LinkEstimate()
    after_s = drive(estimate, 100 * MIB, 0.0)
    after_s = drive(estimate, 10 * MIB, after_s, at_full_rate=False)
    assert estimate.rate_bytes_per_s == pytest.approx(100 * MIB, rel=0.01)
    after_s = drive(estimate, 300 * MIB, after_s, at_full_rate=False)
    assert estimate.rate_bytes_per_s is not None
    assert estimate.rate_bytes_per_s > 200 * MIB
    drive(estimate, 10 * MIB, after_s)
    assert estimate.rate_bytes_per_s < 200 * MIB


def test_acknowledgement_without_anything_outstanding_is_ignored() -> None:
    estimate = LinkEstimate()
    estimate.acknowledged(100 * MIB, 1.0, still_busy=False)
    assert estimate.rate_bytes_per_s is None


@given(st.lists(st.floats(0.001, 1000), min_size=1))
def test_smoothed_value_stays_between_its_samples(samples: list[float]) -> None:
    value = SmoothedValue()
    for sample in samples:
        value.add(sample)
    assert value.value is not None
    assert min(samples) <= value.value * 1.000001
    assert value.value <= max(samples) * 1.000001


def test_windows_that_waited_for_prefill_raise_the_estimate_but_never_lower_it() -> None:
    estimate = LinkEstimate()
    after_s = drive(estimate, 100 * MIB, 0.0)
    for step in range(50):
        estimate.busy(after_s + step * 0.1)
        estimate.starved()
        estimate.acknowledged(MIB, after_s + (step + 1) * 0.1, still_busy=step < 49)
    assert estimate.rate_bytes_per_s == pytest.approx(100 * MIB, rel=0.01)
    drive(estimate, 10 * MIB, after_s + 60)
    assert estimate.rate_bytes_per_s < 50 * MIB
