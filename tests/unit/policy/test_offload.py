from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.cluster import PlacementReason
from farfill.policy.offload import REMOTE_REASONS, Forced, OffloadInputs, PrefillAvailability, decide, uncached_tokens

AVAILABLE = PrefillAvailability.AVAILABLE


def inputs(
    prompt: int,
    hit: int = 0,
    threshold: int = 100,
    availability: PrefillAvailability = AVAILABLE,
    forced: Forced | None = None,
) -> OffloadInputs:
    return OffloadInputs(
        prompt_tokens=prompt, hit_tokens=hit, threshold_tokens=threshold, availability=availability, forced=forced
    )


@pytest.mark.parametrize(
    ("given_inputs", "reason"),
    [
        (inputs(100), PlacementReason.BELOW_THRESHOLD),  # the last token is decode's: 99 uncached
        (inputs(101), PlacementReason.ABOVE_THRESHOLD),
        (inputs(201, hit=101), PlacementReason.BELOW_THRESHOLD),
        (inputs(201, hit=100), PlacementReason.ABOVE_THRESHOLD),
        (inputs(2, threshold=0), PlacementReason.ABOVE_THRESHOLD),
        (inputs(2, hit=1, threshold=0), PlacementReason.BELOW_THRESHOLD),
        (inputs(1, threshold=0), PlacementReason.TOO_SHORT),
        (inputs(1, forced=Forced.REMOTE), PlacementReason.TOO_SHORT),
        (inputs(1, forced=Forced.LOCAL), PlacementReason.FORCED_LOCAL),
        (inputs(5000, forced=Forced.LOCAL), PlacementReason.FORCED_LOCAL),
        (inputs(2, forced=Forced.REMOTE), PlacementReason.FORCED_REMOTE),
        (inputs(500, availability=PrefillAvailability.NONE_READY), PlacementReason.NO_PREFILL_INSTANCE),
        (inputs(500, availability=PrefillAvailability.FINGERPRINT_MISMATCH), PlacementReason.FINGERPRINT_MISMATCH),
        (inputs(500, availability=PrefillAvailability.BREAKER_OPEN), PlacementReason.BREAKER_OPEN),
        (inputs(50, availability=PrefillAvailability.BREAKER_OPEN), PlacementReason.BELOW_THRESHOLD),
        (
            inputs(50, availability=PrefillAvailability.BREAKER_OPEN, forced=Forced.REMOTE),
            PlacementReason.BREAKER_OPEN,
        ),
    ],
)
def test_decision(given_inputs: OffloadInputs, reason: PlacementReason) -> None:
    assert decide(given_inputs) is reason


@given(
    prompt=st.integers(1, 10_000),
    hit=st.integers(0, 10_000),
    threshold=st.integers(0, 10_000),
    availability=st.sampled_from(PrefillAvailability),
    forced=st.sampled_from([None, *Forced]),
)
def test_remote_only_when_there_is_something_to_send_and_someone_to_send_it(
    prompt: int, hit: int, threshold: int, availability: PrefillAvailability, forced: Forced | None
) -> None:
    remote = decide(inputs(prompt, hit, threshold, availability, forced)) in REMOTE_REASONS
    if remote:
        assert prompt > 1
        assert availability is AVAILABLE
        assert forced is Forced.REMOTE or uncached_tokens(prompt, hit) >= max(1, threshold)
    elif forced is None and availability is AVAILABLE:
        assert uncached_tokens(prompt, hit) < max(1, threshold)
