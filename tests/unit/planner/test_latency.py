"""Times to first token and between tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farfill.planner.curves import QuadraticCurve
from farfill.planner.kv_size import MeasuredKVSize
from farfill.planner.latency import FarPath, Traffic, TtftModel, decode_load, ttft_model
from farfill.planner.lengths import observed, uniform
from farfill.planner.profile import DecodePoint, Profile

PROFILE = Profile(
    name="p",
    accelerator="",
    gpus_per_instance=1,
    prefill=QuadraticCurve(0.0, 1e-4, 0.0),
    decode=(DecodePoint(batch=1, context_tokens=0, step_s=0.01), DecodePoint(batch=11, context_tokens=0, step_s=0.02)),
    max_batch=21,
    sources=(),
)
STEP_S = 0.02


def model(rate: float, threshold: float, *, rtt_s: float = 0.1, link: float = 1e8, instances: int = 2) -> TtftModel:
    traffic = Traffic(
        rate_per_s=rate,
        lengths=uniform(0.001, 20_000),
        kv=MeasuredKVSize(((0.0, 1e7), (20_000.0, 2.1e8))),  # 10 MB and 10 KB a token
        threshold_tokens=threshold,
        arrival_scv=1.0,
        chunk_tokens=1000,
    )
    path = FarPath(profile=PROFILE, instances=instances, share_of_far=1.0, link_bytes_per_s=link, rtt_s=rtt_s)
    return ttft_model(traffic, PROFILE, instances, [path], STEP_S)


def test_near_prefill_is_prefill_and_one_step():
    alone = model(1e-6, 20_000)
    assert alone.mean_s(queued=False) == pytest.approx(1.0 + STEP_S, rel=1e-3)
    assert alone.quantile_s(0.9, queued=False) == pytest.approx(1.8 + STEP_S, rel=1e-3)
    assert alone.mean_s() == pytest.approx(alone.mean_s(queued=False), rel=1e-3)


def test_a_fast_link_adds_a_round_trip_and_the_last_chunk():
    far = model(1e-6, 0.0, link=1e12)
    assert far.mean_s(queued=False) == pytest.approx(1.0 + STEP_S + 0.1, rel=1e-3)
    slower = model(1e-6, 0.0, link=1e9)  # states and a chunk of 1000 tokens: up to 20 MB
    assert slower.mean_s(queued=False) - far.mean_s(queued=False) == pytest.approx(0.02, rel=0.05)


def test_a_slow_link_is_waited_for():
    # 1 MB/s carries 100 tokens a second, prefill makes 10 000: transfer is all there is.
    assert model(1e-6, 0.0, link=1e6).mean_s(queued=False) == pytest.approx(110 + 0.1 + STEP_S, rel=0.01)


def test_quantiles_and_shares_agree():
    busy = model(1.5, 10_000, link=4e8)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert busy.within(busy.quantile_s(share)) == pytest.approx(share, abs=2e-3)
    assert busy.mean_s() > busy.mean_s(queued=False)
    grid = np.linspace(0, 60, 6001)
    mean = float(np.sum([1 - busy.within(float(t)) for t in grid]) * 0.01)
    assert mean == pytest.approx(busy.mean_s(), rel=0.02)


@pytest.mark.parametrize(("rate", "link"), [(100.0, 1e12), (1.5, 1e8)])
def test_overload_of_instances_or_link_never_ends(rate: float, link: float):
    lost = model(rate, 10_000, link=link)
    assert math.isinf(lost.mean_s())
    assert math.isinf(lost.summary(queued=True).p90_s)
    assert lost.summary(queued=False) == model(1e-6, 10_000, link=link).summary(queued=False)


def test_a_shared_link_is_slower():
    calm, busy = (model(rate, 0.0, link=2e8, instances=50).mean_s() for rate in (1e-6, 1.0))
    assert busy > calm + 0.1


def test_decode_settles_where_load_and_step_meet():
    load = decode_load(PROFILE, 4.0, 1, output_tokens=100, context_tokens=0, max_batch=21)
    assert load.batch == pytest.approx(400 * load.tpot_s, rel=1e-4)
    assert load.tpot_s == pytest.approx(0.009 + 0.001 * load.batch, rel=1e-6)
    assert load.utilisation == pytest.approx(4.0 / (21 / (0.03 * 100)))
    over = decode_load(PROFILE, 50.0, 1, output_tokens=100, context_tokens=0, max_batch=21)
    assert over.utilisation > 1
    assert over.tpot_s == pytest.approx(0.03)
    assert math.isinf(decode_load(PROFILE, 1.0, 0, output_tokens=1, context_tokens=0, max_batch=1).tpot_s)


def test_lengths_know_both_sides_of_a_threshold():
    lengths = observed([1, 2, 3, 4], [1, 1, 1, 5])
    assert lengths.mean == pytest.approx(26 / 8)
    assert (lengths.above(2).share, lengths.above(2).mean_tokens) == pytest.approx((6 / 8, 23 / 6))
    assert (lengths.up_to(2).share, lengths.up_to(2).mean_tokens) == pytest.approx((2 / 8, 1.5))
    assert lengths.above(4).share == 0
    assert [lengths.quantile(q) for q in (0.1, 0.25, 0.3, 1.0)] == [1, 2, 3, 4]
