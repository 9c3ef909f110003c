"""Shares that only grow, and guards that hold or take back."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.rollout import (
    ANY,
    GuardLimits,
    Share,
    ShareQuery,
    StepAction,
    StepObservation,
    Sticky,
    VersionInputs,
    decide_step,
    in_share,
    share_for,
    slot_of,
    version_refusal,
)

GOOD = StepObservation(
    percent=10,
    step_age_s=1000,
    far_requests=1000,
    far_failures=0,
    ttft_ratio=0.6,
    link_utilisation=0.3,
    parity_samples=50,
    parity_mismatches=0,
)
LIMITS = GuardLimits(min_parity=10)


def query(session: str = "", request: str = "r", model: str = "m", tenant: str = "t") -> ShareQuery:
    return ShareQuery(model=model, tenant=tenant, session=session, request=request)


@given(st.text(), st.text(), st.floats(0, 100), st.floats(0, 100), st.sampled_from(list(Sticky)))
def test_who_is_in_stays_in_when_the_share_grows(session: str, request: str, a: float, b: float, sticky: Sticky):
    low, high = sorted((a, b))
    if in_share(Share(percent=low, sticky=sticky), query(session, request)):
        assert in_share(Share(percent=high, sticky=sticky), query(session, request))


@pytest.mark.parametrize("percent", [1.0, 10.0, 50.0])
def test_share_is_what_it_says(percent: float):
    count = sum(in_share(Share(percent=percent), query(request=str(i))) for i in range(20_000))
    assert count / 200 == pytest.approx(percent, abs=max(0.3, percent * 0.05))


def test_session_sticks_and_requests_do_not():
    half = Share(percent=50)
    for session in map(str, range(50)):
        assert len({in_share(half, query(session, str(i))) for i in range(20)}) == 1
    each = dataclasses.replace(half, sticky=Sticky.REQUEST)
    assert len({in_share(each, query("s", str(i))) for i in range(50)}) == 2
    assert in_share(None, query())
    assert in_share(Share(percent=100), query())
    assert not any(in_share(Share(percent=0), query(request=str(i))) for i in range(100))


def test_salt_model_and_tenant_draw_others():
    slots = {slot_of(salt, model, tenant, "k") for salt in "ab" for model in "ab" for tenant in "ab"}
    assert len(slots) == 8
    assert slot_of("a", "bc", "", "k") != slot_of("ab", "c", "", "k")


def test_most_particular_share_counts():
    shares = {(ANY, ANY): Share(percent=1), (ANY, "t"): Share(percent=2), ("m", ANY): Share(percent=3)}

    def percent(model: str, tenant: str) -> float:
        share = share_for(shares, model, tenant)
        assert share is not None
        return share.percent

    assert [percent("x", "y"), percent("x", "t"), percent("m", "t")] == [1, 2, 3]
    shares["m", "t"] = Share(percent=4)
    assert percent("m", "t") == 4
    assert share_for({}, "m", "t") is None


@pytest.mark.parametrize(
    ("changes", "action", "percent", "reason"),
    [
        ({}, StepAction.ADVANCE, 50, "guards_passed"),
        ({"percent": 1}, StepAction.ADVANCE, 10, "guards_passed"),
        ({"percent": 25}, StepAction.ADVANCE, 50, "guards_passed"),
        ({"percent": 100}, StepAction.DONE, 100, "complete"),
        ({"percent": 0}, StepAction.HOLD, 0, "stopped"),
        ({"step_age_s": 299}, StepAction.HOLD, 10, "step_age"),
        ({"far_requests": 99}, StepAction.HOLD, 10, "few_requests"),
        ({"parity_samples": 9}, StepAction.HOLD, 10, "few_parity_samples"),
        ({"ttft_ratio": None}, StepAction.HOLD, 10, "ttft_unknown"),
        ({"ttft_ratio": 1.2}, StepAction.HOLD, 10, "ttft"),
        ({"link_utilisation": 0.71}, StepAction.HOLD, 10, "link_utilisation"),
        ({"ttft_ratio": 1.6}, StepAction.REVERT, 0, "ttft"),
        ({"far_failures": 6}, StepAction.REVERT, 0, "success_rate"),
        ({"far_failures": 5}, StepAction.ADVANCE, 50, "guards_passed"),
        ({"parity_mismatches": 1, "step_age_s": 0, "far_requests": 1}, StepAction.REVERT, 0, "parity_mismatch"),
        ({"far_failures": 1, "far_requests": 1, "step_age_s": 1}, StepAction.REVERT, 0, "success_rate"),
        ({"ttft_ratio": 9.0, "far_requests": 3}, StepAction.HOLD, 10, "few_requests"),
    ],
)
def test_step(changes, action: StepAction, percent: float, reason: str):
    decided = decide_step(LIMITS, dataclasses.replace(GOOD, **changes))
    assert (decided.action, decided.percent, decided.reason) == (action, percent, reason)


@given(
    st.builds(
        StepObservation,
        percent=st.sampled_from([0.0, 1.0, 10.0, 50.0, 100.0]),
        step_age_s=st.floats(0, 1000),
        far_requests=st.integers(0, 1000),
        far_failures=st.integers(0, 20),
        ttft_ratio=st.none() | st.floats(0.1, 3),
        link_utilisation=st.floats(0, 1),
        parity_samples=st.integers(0, 50),
        parity_mismatches=st.integers(0, 1),
    )
)
def test_step_never_skips_and_never_advances_past_a_guard(seen: StepObservation):
    decided = decide_step(LIMITS, seen)
    if decided.action is StepAction.ADVANCE:
        assert decided.percent == {1.0: 10, 10.0: 50, 50.0: 100}[seen.percent]
        assert seen.parity_mismatches == 0
        assert seen.ttft_ratio is not None
        assert seen.ttft_ratio <= 1.0
        assert seen.link_utilisation <= 0.7
    elif decided.action is StepAction.REVERT:
        assert decided.percent == 0
    else:
        assert decided.percent == seen.percent


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, ""),
        ({"new": ("f", 9)}, "protocol_version"),
        ({"prefill_percent": 50.0, "decode_percent": 1.0}, "prefill_first"),
        ({"prefill_percent": 100.0, "decode_percent": 1.0}, ""),
        ({"new": ("g", 1), "prefill_percent": 0.0, "decode_percent": 1.0}, "no_prefill_of_fingerprint"),
        ({"new": ("g", 1), "prefill_percent": 50.0, "decode_percent": 50.0}, ""),
    ],
)
def test_new_version_goes_to_prefill_first_and_must_be_understood(changes, refusal: str):
    inputs = VersionInputs(old=("f", 1), new=("f", 1), spoken=(1,), prefill_percent=0.0, decode_percent=0.0)
    assert version_refusal(dataclasses.replace(inputs, **changes)) == refusal
