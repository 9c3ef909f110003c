"""When the threshold is searched again."""

from __future__ import annotations

import dataclasses

import pytest

from farfill.policy.regime import Bandwidth, BandwidthRegime, RegimeLimits, SearchTrigger, Strain, Trigger

CALM = Strain(far_queue_s=0.0, near_queue_s=0.0, utilisation=0.2, capacities=(4.0, 2.0, 1e9))
LIMITS = RegimeLimits(research_period_s=5.0, surge_queue_s=2.0)


def strained(**changes: object) -> Strain:
    return dataclasses.replace(CALM, **changes)


@pytest.mark.parametrize(
    ("strain", "trigger"),
    [
        (strained(utilisation=0.8), Trigger.EGRESS_PRESSURE),
        (strained(far_queue_s=3.0), Trigger.QUEUE_SURGE),
        (strained(near_queue_s=3.0), Trigger.NEAR_SURGE),
        (strained(capacities=(4.0, 2.0, 0.0)), Trigger.CAPACITY),
        (strained(capacities=(4.0, 0.0, 1e9)), Trigger.CAPACITY),
        (strained(capacities=(9.0, 2.0, 1e9)), Trigger.CAPACITY),
        (strained(capacities=(4.0, 2.0, 1e9, 1e9)), Trigger.CAPACITY),
        (strained(capacities=(3.0, 2.0, 0.6e9)), None),
        (CALM, None),
    ],
)
def test_what_asks_for_a_search(strain: Strain, trigger: Trigger | None) -> None:
    machine = SearchTrigger(LIMITS)
    assert machine.due(CALM, 0.0) is None
    assert machine.due(strain, 1.0) is trigger


def test_not_twice_in_a_period_and_once_more_when_all_is_calm() -> None:
    machine = SearchTrigger(LIMITS)
    surge = strained(near_queue_s=3.0)
    assert [machine.due(surge, float(t)) for t in range(6)] == [Trigger.NEAR_SURGE, *[None] * 4, Trigger.NEAR_SURGE]
    assert machine.due(CALM, 10.0) is Trigger.RELIEF
    assert machine.due(CALM, 20.0) is None


def test_a_link_that_is_cut_for_long_is_searched_for_again_once_it_is_back() -> None:
    machine = SearchTrigger(LIMITS)
    cut = strained(capacities=(4.0, 2.0, 0.0))
    assert machine.due(CALM, 0.0) is None
    told = [machine.due(cut, 10.0 * t) for t in range(1, 10)]
    assert told == [Trigger.CAPACITY, Trigger.RELIEF, *[None] * 7]
    assert machine.due(CALM, 100.0) is Trigger.CAPACITY, "whatever was right while it was cut is wrong now"


def test_only_the_latest_lengths_are_kept() -> None:
    machine = SearchTrigger(RegimeLimits(window_lengths=3))
    for length in (1, 2, 3, 4):
        machine.seen(length)
    assert machine.lengths() == (2, 3, 4)


def test_a_search_for_another_reason_counts_too() -> None:
    machine = SearchTrigger(LIMITS)
    machine.due(CALM, 0.0)
    twice = strained(capacities=(4.0, 5.0, 1e9))
    machine.searched(twice, 1.0)
    assert machine.due(strained(utilisation=0.9, capacities=twice.capacities), 2.0) is None, "within the period"
    assert machine.due(twice, 7.0) is None


def test_a_regime_keeps_its_state_between_the_bounds_and_for_its_dwell() -> None:
    regime = BandwidthRegime(RegimeLimits(scarce_above=0.7, abundant_below=0.5, dwell_s=10.0))
    assert regime.observe(0.4, 0.0) is Bandwidth.ABUNDANT
    assert regime.observe(0.9, 5.0) is Bandwidth.ABUNDANT
    assert regime.observe(0.6, 11.0) is Bandwidth.ABUNDANT
    assert regime.observe(0.9, 12.0) is Bandwidth.SCARCE
