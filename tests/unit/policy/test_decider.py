"""The offload decider: threshold, caches by abundance, site by estimated TTFT, and what stands in the way."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.core.cluster import PlacementReason
from farfill.policy.decider import OffloadQuery, SiteInputs, decide_offload, estimate_site
from farfill.policy.offload import Forced, OffloadInputs, PrefillAvailability, decide
from farfill.policy.regime import Bandwidth, BandwidthRegime, RegimeLimits

REMOTE = (PlacementReason.ABOVE_THRESHOLD, PlacementReason.FORCED_REMOTE, PlacementReason.FAR_CACHE)
FAR = SiteInputs(
    site="far",
    prefill_s_per_token=1e-4,
    link_bytes_per_s=1e9,
    rtt_s=0.03,
    kv_bytes_per_token=1e5,
    kv_fixed_bytes=1e8,
    chunk_tokens=2000,
)
QUERY = OffloadQuery(prompt_tokens=10_001, near_hit_tokens=0, threshold_tokens=4096, sites=(FAR,))


def query(**changes) -> OffloadQuery:
    return msgspec.structs.replace(QUERY, **changes)


def site(**changes) -> SiteInputs:
    return msgspec.structs.replace(FAR, **changes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (query(), PlacementReason.ABOVE_THRESHOLD),
        (query(prompt_tokens=4097), PlacementReason.ABOVE_THRESHOLD),
        (query(prompt_tokens=4096), PlacementReason.BELOW_THRESHOLD),
        (query(near_hit_tokens=5905), PlacementReason.BELOW_THRESHOLD),
        (query(prompt_tokens=1, threshold_tokens=0), PlacementReason.TOO_SHORT),
        (query(prompt_tokens=2, near_hit_tokens=1, threshold_tokens=0), PlacementReason.BELOW_THRESHOLD),
        (query(forced=Forced.LOCAL), PlacementReason.FORCED_LOCAL),
        (query(prompt_tokens=10, forced=Forced.REMOTE, in_rollout=False), PlacementReason.FORCED_REMOTE),
        (query(in_rollout=False), PlacementReason.ROLLOUT),
        (query(in_rollout=False, prompt_tokens=10), PlacementReason.BELOW_THRESHOLD),
        (query(blocked=PlacementReason.FINGERPRINT_MISMATCH), PlacementReason.FINGERPRINT_MISMATCH),
        (query(sites=()), PlacementReason.NO_PREFILL_INSTANCE),
        (query(sites=(site(allowed=False),)), PlacementReason.BREAKER_OPEN),
        (query(sites=(site(utilisation=0.96),)), PlacementReason.LINK_BUSY),
        (query(sites=(site(utilisation=0.96), site(site="b", allowed=False))), PlacementReason.LINK_BUSY),
    ],
)
def test_reason(asked: OffloadQuery, reason: PlacementReason):
    decided = decide_offload(asked)
    assert decided.reason is reason
    assert (decided.site is not None) == (reason in REMOTE)


def test_scarce_counts_near_cache_only_and_abundant_the_best_anywhere():
    cached_far = (site(hit_tokens=8000),)
    assert decide_offload(query(sites=cached_far)).reason is PlacementReason.ABOVE_THRESHOLD
    abundant = decide_offload(query(sites=cached_far, bandwidth=Bandwidth.ABUNDANT))
    assert (abundant.reason, abundant.compared_tokens, abundant.site) == (PlacementReason.FAR_CACHE, 2000, "far")
    held_back = decide_offload(query(sites=cached_far, bandwidth=Bandwidth.ABUNDANT, in_rollout=False))
    assert (held_back.reason, held_back.site) == (PlacementReason.BELOW_THRESHOLD, None)
    copied = decide_offload(query(near_hit_tokens=3000, bandwidth=Bandwidth.ABUNDANT))
    assert (copied.site, copied.copy_hit_tokens, copied.compared_tokens) == ("far", 3000, 7000)
    scarce = decide_offload(query(near_hit_tokens=3000))
    assert (scarce.site, scarce.copy_hit_tokens) == ("far", 0)
    assert scarce.estimates[0].uncached_tokens == 10_000
    assert copied.estimates[0].uncached_tokens == 7000


def test_estimate_is_queue_plus_prefill_plus_what_it_does_not_hide():
    # 10,000 tokens: 1 s of prefill, 1 s of rows on the link, of which all but the last of five chunks can hide.
    estimate = estimate_site(QUERY, site(queue_s=0.5))
    assert estimate.prefill_s == pytest.approx(1.0)
    assert estimate.transfer_s == pytest.approx(1.0 - 0.8 + 0.1 + 0.03)
    assert estimate.ttft_s == pytest.approx(0.5 + 1.0 + 0.33)
    slow_link = estimate_site(QUERY, site(link_bytes_per_s=1e8))
    assert slow_link.transfer_s == pytest.approx(10.0 - 0.8 + 1.0 + 0.03)
    assert estimate_site(QUERY, site(link_bytes_per_s=None)).ttft_s is None


def test_site_with_the_earliest_first_token_wins():
    near_by = site(site="near-by", rtt_s=0.01, queue_s=2.0)
    warm = site(site="warm", hit_tokens=9000, rtt_s=0.1)
    assert decide_offload(query(sites=(FAR, near_by))).site == "far"
    assert decide_offload(query(sites=(FAR, near_by, warm))).site == "warm"
    assert decide_offload(query(sites=(FAR, near_by, msgspec.structs.replace(warm, allowed=False)))).site == "far"


def test_idle_site_never_measured_is_tried_first_and_a_busy_one_last():
    unknown = site(site="new", prefill_s_per_token=None)
    assert decide_offload(query(sites=(FAR, unknown))).site == "new"
    assert decide_offload(query(sites=(FAR, msgspec.structs.replace(unknown, queue_s=0.1)))).site == "far"
    assert decide_offload(query(sites=(msgspec.structs.replace(unknown, queue_s=0.1),))).site == "new"


sites = st.lists(
    st.builds(
        SiteInputs,
        site=st.sampled_from(["a", "b", "c"]),
        hit_tokens=st.integers(0, 9000),
        queue_s=st.floats(0, 5),
        prefill_s_per_token=st.none() | st.floats(1e-6, 1e-2),
        link_bytes_per_s=st.none() | st.floats(1e3, 1e10),
        rtt_s=st.floats(0, 0.2),
        kv_bytes_per_token=st.floats(0, 1e6),
        kv_fixed_bytes=st.floats(0, 1e9),
        chunk_tokens=st.integers(1, 4096),
        utilisation=st.floats(0, 1),
        allowed=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda s: s.site,
).map(tuple)
queries = st.builds(
    OffloadQuery,
    prompt_tokens=st.integers(1, 10_000),
    near_hit_tokens=st.integers(0, 9999),
    threshold_tokens=st.integers(0, 9000),
    bandwidth=st.sampled_from(list(Bandwidth)),
    sites=sites,
    forced=st.none() | st.sampled_from(list(Forced)),
    in_rollout=st.booleans(),
)


@given(queries)
def test_remote_only_to_a_usable_site_and_none_that_is_measured_is_faster(asked: OffloadQuery):
    decided = decide_offload(asked)
    if decided.site is None:
        assert decided.reason not in REMOTE
        return
    chosen = next(s for s in asked.sites if s.site == decided.site)
    assert chosen.allowed
    assert chosen.utilisation <= asked.utilisation_limit
    own = next(e for e in decided.estimates if e.site == decided.site)
    if own.ttft_s is not None:
        assert all(e.ttft_s is None or e.ttft_s >= own.ttft_s for e in decided.estimates)
        assert own.ttft_s >= own.queue_s
    if decided.reason is PlacementReason.FAR_CACHE:  # near would have to compute as much as goes far otherwise
        assert asked.prompt_tokens - 1 - asked.near_hit_tokens >= max(1, asked.threshold_tokens)
        assert chosen.hit_tokens > asked.near_hit_tokens
    elif asked.forced is None:
        assert decided.compared_tokens >= max(1, asked.threshold_tokens)


@given(queries, st.integers(0, 9999))
def test_more_cache_never_turns_local_into_remote(asked: OffloadQuery, more: int):
    if decide_offload(asked).reason is PlacementReason.BELOW_THRESHOLD:
        warmer = msgspec.structs.replace(asked, near_hit_tokens=max(more, asked.near_hit_tokens))
        assert decide_offload(warmer).reason is PlacementReason.BELOW_THRESHOLD


@given(st.integers(1, 9000), st.integers(0, 9000), st.integers(0, 9000), st.none() | st.sampled_from(list(Forced)))
def test_fixed_threshold_decides_as_it_always_did(prompt: int, hit: int, threshold: int, forced: Forced | None):
    before = decide(
        OffloadInputs(
            prompt_tokens=prompt,
            hit_tokens=hit,
            threshold_tokens=threshold,
            availability=PrefillAvailability.AVAILABLE,
            forced=forced,
        )
    )
    asked = query(prompt_tokens=prompt, near_hit_tokens=hit, threshold_tokens=threshold, forced=forced)
    assert decide_offload(asked).reason is before


def test_regime_changes_at_its_bounds_and_not_too_often():
    regime = BandwidthRegime(RegimeLimits())
    assert regime.observe(0.6, 0) is Bandwidth.SCARCE
    assert regime.observe(0.49, 1) is Bandwidth.ABUNDANT
    assert regime.observe(0.99, 10.9) is Bandwidth.ABUNDANT
    assert regime.observe(0.7, 11) is Bandwidth.ABUNDANT
    assert regime.observe(0.71, 12) is Bandwidth.SCARCE
    assert regime.observe(0.5, 30) is Bandwidth.SCARCE
    with pytest.raises(ValueError, match="abundant_below"):
        RegimeLimits(abundant_below=0.8)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1)), max_size=60))
def test_regime_never_flaps(seen: list[tuple[float, float]]):
    regime, now_s, changes = BandwidthRegime(RegimeLimits(dwell_s=10)), 0.0, []
    for pause_s, utilisation in seen:
        now_s += pause_s
        before = regime.state
        after = regime.observe(utilisation, now_s)
        if after is not before:
            changes.append(now_s)
            assert utilisation > 0.7 if after is Bandwidth.SCARCE else utilisation < 0.5
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(changes))
