"""The search against the paper's case study, against brute force, and its edges."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.threshold import Curve, ThresholdInputs, search_threshold

MIB = 1024 * 1024
# Table 5 (8 × H200) and a fit of the H20 times of Table 6; see arXiv 2604.15039.
H200 = Curve(((1024, 0.44), (8192, 0.72), (32_768, 1.84), (131_072, 7.40)))
H20 = Curve(tuple((n, 0.469 + 1.3e-4 * n + 2.94e-10 * n * n) for n in range(0, 131_073, 2048)))
KV = Curve(((1024, 190.8 * MIB), (8192, 308.9 * MIB), (32_768, 701.3 * MIB), (131_072, 2316.3 * MIB)))


def paper_lengths(count: int = 4000) -> tuple[int, ...]:
    """Log-normal, mu 9.90, sigma 1.00, truncated to [128, 128 Ki]: its quantiles, evenly."""
    normal = NormalDist(9.90, 1.0)
    low, high = normal.cdf(math.log(128)), normal.cdf(math.log(131_072))
    return tuple(int(math.exp(normal.inv_cdf(low + (high - low) * (i + 0.5) / count))) for i in range(count))


def paper(**changes) -> ThresholdInputs:
    fields: dict = {
        "lengths": paper_lengths(),
        "far_instances": 4,
        "near_instances": 3,
        "far_prefill_s": H200,
        "near_prefill_s": H20,
        "kv_bytes": KV,
        "egress_bytes_per_s": 100e9 / 8,
        "decode_rate": 3.91,
        "lowest": 128,
        "highest": 131_072,
    }
    return ThresholdInputs(**(fields | changes))


def test_case_study_of_the_paper():
    found = search_threshold(paper())
    assert found.threshold_tokens == pytest.approx(19_400, rel=0.03)
    assert found.rate == pytest.approx(3.24, rel=0.015)
    assert found.far_share == pytest.approx(0.496, abs=0.015)
    assert found.egress_bytes_per_s * 8 / 1e9 == pytest.approx(13, rel=0.1)


def test_scarce_link_sends_fewer_and_longer_prompts():
    wide = search_threshold(paper())
    narrow = search_threshold(paper(egress_bytes_per_s=8e9 / 8, near_instances=4, decode_rate=0.782 * 4))
    assert narrow.threshold_tokens > wide.threshold_tokens
    assert narrow.rate < wide.rate
    assert narrow.egress_bytes_per_s <= 8e9 / 8 * 1.001
    assert narrow.rate == pytest.approx(2.65, rel=0.03)


def test_without_far_instances_nothing_is_far_and_without_near_everything():
    assert search_threshold(paper(far_instances=0)).far_share == 0.0
    assert search_threshold(paper(egress_bytes_per_s=0.0)).far_share == 0.0
    assert search_threshold(paper(near_instances=0, lowest=0)).far_share == 1.0


def test_small_gain_keeps_the_threshold():
    best = search_threshold(paper())
    near = search_threshold(paper(current=best.threshold_tokens + 200))
    assert not near.changed
    assert near.threshold_tokens == best.threshold_tokens + 200
    far = search_threshold(paper(current=100_000))
    assert far.changed
    assert far.rate > far.rate_before * 1.02
    assert search_threshold(paper(current=0)).threshold_tokens >= 128


def test_no_lengths_change_nothing():
    kept = search_threshold(paper(lengths=(), current=5000))
    assert (kept.threshold_tokens, kept.changed, kept.rate) == (5000, False, 0.0)


def test_curve():
    curve = Curve(((10, 1.0), (20, 3.0), (40, 3.0)))
    assert [curve.at(x) for x in (0, 10, 15, 20, 30, 40, 80)] == [0.0, 1.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert Curve(((100, 2.0),)).at(50) == 1.0


small = st.builds(
    lambda lengths, far, near, egress, decode, current: ThresholdInputs(
        lengths=tuple(lengths),
        far_instances=far,
        near_instances=near,
        far_prefill_s=Curve(((0, 0.2), (1000, 1.0))),
        near_prefill_s=Curve(((0, 0.3), (1000, 2.5))),
        kv_bytes=Curve(((0, 100.0), (1000, 2000.0))),
        egress_bytes_per_s=egress,
        decode_rate=decode,
        highest=2000,
        current=current,
        gain=0.0,
    ),
    st.lists(st.integers(1, 1500), min_size=1, max_size=25),
    st.integers(0, 4),
    st.integers(0, 4),
    st.floats(0, 1e5),
    st.none() | st.floats(0.01, 10),
    st.integers(0, 2000),
)


@given(small)
def test_no_threshold_serves_more_than_the_one_found(inputs: ThresholdInputs):
    found = search_threshold(inputs)

    def rate(t: int) -> float:
        long = [n for n in inputs.lengths if n >= t]
        short = [n for n in inputs.lengths if n < t]
        rates = [math.inf if inputs.decode_rate is None else inputs.decode_rate]
        count = len(inputs.lengths)
        if long:
            mean = sum(long) / len(long)
            able = min(
                inputs.far_instances / inputs.far_prefill_s.at(mean),
                inputs.egress_bytes_per_s / inputs.kv_bytes.at(mean),
            )
            rates.append(able * count / len(long))
        if short:
            mean = sum(short) / len(short)
            rates.append(inputs.near_instances / inputs.near_prefill_s.at(mean) * count / len(short))
        return min(rates)

    assert found.rate == pytest.approx(rate(found.threshold_tokens))
    assert found.rate >= max(rate(t) for t in range(0, 2001, 7)) * (1 - 1e-6)
    again = search_threshold(inputs)
    assert again == found
