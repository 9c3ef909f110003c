"""The slow loop: grows at once, shrinks late, converts before it buys, keeps to bounds and price."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.scaling import Group, GroupLimits, GroupLoad, Scaler, ScalingLimits, ScalingReason, Schedule

PREFILL, DECODE, FAR = Group("near", "prefill"), Group("near", "decode"), Group("far", "prefill")
GROUPS = {group: GroupLimits(minimum=1, maximum=10) for group in (PREFILL, DECODE, FAR)}
LIMITS = ScalingLimits(cooldown_out_s=60, cooldown_in_s=300)


def load(ready: int, busy: float, waiting_s: float = 0.0, starting: int = 0) -> GroupLoad:
    return GroupLoad(ready=ready, busy=busy, waiting_s=waiting_s, starting=starting)


def test_a_busy_group_grows_to_its_target_and_then_cools_down() -> None:
    scaler = Scaler(LIMITS, GROUPS)
    (change,) = scaler.decide({FAR: load(2, 2.0, waiting_s=120)}, 0.0)
    assert (change.before, change.after, change.reason) == (2, 6, ScalingReason.BUSY)  # (2 + 120 / 60) / 0.7
    assert scaler.decide({FAR: load(2, 2.0, waiting_s=600, starting=4)}, 30.0) == ()
    assert scaler.decide({FAR: load(6, 6.0)}, 61.0)[0].after == 9


def test_a_load_between_the_limits_changes_nothing() -> None:
    scaler = Scaler(LIMITS, GROUPS)
    for i in range(100):
        assert scaler.decide({FAR: load(4, 2.1 + 1.2 * (i % 2))}, i * 30.0) == ()


def test_low_load_must_last_before_anything_is_taken_away() -> None:
    scaler = Scaler(LIMITS, GROUPS)
    changes = {at: scaler.decide({FAR: load(6, 1.0)}, float(at)) for at in range(0, 330, 30)}
    assert {at for at, found in changes.items() if found} == {300}
    assert changes[300][0].after == 2
    assert changes[300][0].reason is ScalingReason.IDLE


def test_one_peak_in_the_window_keeps_what_it_needed() -> None:
    scaler = Scaler(LIMITS, GROUPS)
    found = [scaler.decide({FAR: load(6, 3.5 if at == 270 else 1.0)}, float(at)) for at in range(0, 570, 30)]
    assert all(c.after >= 5 for changes in found for c in changes)


def test_a_role_with_room_gives_before_anything_is_bought() -> None:
    scaler = Scaler(ScalingLimits(convert=frozenset({"near"})), GROUPS)
    changes = scaler.decide({PREFILL: load(2, 2.0, waiting_s=30), DECODE: load(6, 2.0)}, 0.0)
    assert {str(c.group): (c.before, c.after, c.converted) for c in changes} == {
        "near/prefill": (2, 4, 2),
        "near/decode": (6, 4, -2),
    }
    assert all(c.reason is ScalingReason.CONVERTED for c in changes)


def test_without_leave_to_convert_each_role_keeps_its_own() -> None:
    (change,) = Scaler(LIMITS, GROUPS).decide({PREFILL: load(2, 2.0, waiting_s=30), DECODE: load(6, 3.5)}, 0.0)
    assert change.group == PREFILL


def test_growth_stops_at_the_maximum_and_at_the_price() -> None:
    assert Scaler(LIMITS, GROUPS).decide({FAR: load(8, 8.0, waiting_s=1e5)}, 0.0)[0].after == 10
    dear = {FAR: GroupLimits(minimum=1, maximum=10, price=3.0)}
    assert Scaler(ScalingLimits(price_limit=20), dear).decide({FAR: load(2, 2.0, waiting_s=1e5)}, 0.0)[0].after == 6


@pytest.mark.parametrize(
    ("hour", "bounds"), [(21, (1, 10)), (22, (6, 8)), (23, (6, 8)), (24 + 5, (6, 8)), (24 + 6, (1, 10))]
)
def test_a_night_schedule_reaches_past_midnight(hour: int, bounds: tuple[int, int]) -> None:
    night = Schedule(group=FAR, from_minute=22 * 60, to_minute=6 * 60, minimum=6, maximum=8, days=(4,))
    friday_s = 86_400 * (19_000 + (4 - (19_000 + 3) % 7) % 7)
    scaler = Scaler(LIMITS, GROUPS, [night])
    assert scaler.bounds(FAR, friday_s + hour * 3600) == bounds
    assert scaler.bounds(FAR, friday_s + 86_400 + 22 * 3600) == (1, 10)
    if bounds == (6, 8):
        (change,) = scaler.decide({FAR: load(2, 0.1)}, 0.0, friday_s + hour * 3600)
        assert (change.after, change.reason) == (6, ScalingReason.BOUNDS)


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 600), st.floats(0, 20)), min_size=1, max_size=40))
def test_counts_stay_within_bounds_and_conversions_add_up(steps: list[tuple[float, float, float]]) -> None:
    scaler = Scaler(ScalingLimits(convert=frozenset({"near"}), cooldown_in_s=60, price_limit=40), GROUPS)
    counts = {PREFILL: 2, DECODE: 2, FAR: 2}
    for i, (prefill, waiting_s, decode) in enumerate(steps):
        seen = {
            PREFILL: load(counts[PREFILL], min(prefill, counts[PREFILL]), waiting_s),
            DECODE: load(counts[DECODE], min(decode, counts[DECODE])),
            FAR: load(counts[FAR], 1.0),
        }
        changes = scaler.decide(seen, i * 30.0)
        assert sum(change.converted for change in changes) == 0
        for change in changes:
            counts[change.group] = change.after
        assert all(1 <= count <= 10 for count in counts.values())
        assert sum(counts.values()) <= 40


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="in_below < target"):
        ScalingLimits(target=0.4)
    with pytest.raises(ValueError, match="near/decode: 0 <= minimum"):
        Scaler(LIMITS, {DECODE: GroupLimits(minimum=3, maximum=2)})
