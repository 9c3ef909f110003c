"""The solver against brute force, and against the paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.planner.capacity import demand_of, fleet_of
from farfill.planner.curves import QuadraticCurve
from farfill.planner.kv_size import MeasuredKVSize
from farfill.planner.lengths import Lengths, lognormal, observed, uniform
from farfill.planner.problem import read_problem
from farfill.planner.profile import Profile
from farfill.planner.sizing import FarOffer, NearOffer, cheapest
from farfill.planner.throughput import (
    DecodeRate,
    Demand,
    FarPool,
    Fleet,
    best_split,
    best_threshold,
    evaluate,
    homogeneous,
    naive,
)

PAPER = Path(__file__).parents[3] / "examples" / "planning" / "prfaas-paper.yaml"


def profile(fixed_s: float, per_token_s: float, squared: float = 0.0) -> Profile:
    return Profile(
        name="p",
        accelerator="",
        gpus_per_instance=1,
        prefill=QuadraticCurve(fixed_s, per_token_s, squared),
        decode=(),
        max_batch=1,
        sources=(),
    )


def demand(lengths: Lengths, *, mib: float = 100.0, per_token: float = 20_000.0, rate: float = 0.8) -> Demand:
    kv = MeasuredKVSize(((0.0, mib * 2**20), (1e6, mib * 2**20 + 1e6 * per_token)))
    return Demand(lengths=lengths, kv=kv, decode=DecodeRate(batch=20, step_s=0.025, output_tokens=800 / rate))


def test_paper_table_6_is_found():
    problem = read_problem(PAPER)
    wanted, fleet = demand_of(problem), fleet_of(problem)
    found = best_split(fleet, wanted)
    assert (found.far_instances, found.near_prefill, found.near_decode) == (4, 3, 5)
    assert found.threshold_tokens == pytest.approx(19_400, rel=0.015)
    assert found.far_share == pytest.approx(0.496, rel=0.015)
    rates = (found.far_per_s, found.near_prefill_per_s, found.decode_per_s, found.requests_per_s)
    assert rates == pytest.approx((1.61, 1.64, 3.91, 3.24), rel=0.015)
    alone = homogeneous(problem.near.profile, 12, wanted)
    assert (alone.near_prefill, alone.near_decode) == (9, 3)
    assert (alone.requests_per_s, alone.decode_per_s) == pytest.approx((2.11, 2.35), rel=0.015)
    assert naive(fleet, wanted).requests_per_s == pytest.approx(2.45, rel=0.015)
    assert found.requests_per_s / alone.requests_per_s == pytest.approx(1.54, rel=0.015)


def test_means_of_times_are_the_integrals():
    lengths = observed([1000.0, 3000.0, 50_000.0], [2, 1, 1])
    square = profile(0.0, 0.0, 1e-9)
    exact, rough = (
        demand(lengths),
        Demand(lengths=lengths, kv=demand(lengths).kv, decode=demand(lengths).decode, at_mean_length=True),
    )
    below = lengths.up_to(3000)
    assert exact.seconds(square, below) == pytest.approx((2 * 1e-3 + 9e-3) / 3)
    assert rough.seconds(square, below) == pytest.approx((5000 / 3) ** 2 * 1e-9)
    assert exact.seconds(square, lengths.above(3000)) == pytest.approx(2.5)
    assert exact.size_bytes(below) == pytest.approx(rough.size_bytes(below))


@settings(max_examples=60)
@given(
    near=st.integers(2, 12),
    far=st.integers(0, 8),
    gbit=st.floats(0.1, 200),
    slow=st.floats(1.0, 6.0),
    rate=st.floats(0.05, 5.0),
    mu=st.floats(7.0, 11.0),
)
def test_no_grid_point_beats_the_solver(near: int, far: int, gbit: float, slow: float, rate: float, mu: float):
    lengths = lognormal(mu, 1.0, 16, 200_000)
    pool = FarPool(name="far", profile=profile(0.4, 4e-5, 1e-10), instances=far, link_bytes_per_s=gbit * 1e9 / 8)
    fleet = Fleet(near=profile(0.4, 4e-5 * slow, 1e-10 * slow), near_instances=near, far=(pool,))
    wanted = demand(lengths, rate=rate)
    found = best_split(fleet, wanted)
    thresholds = [lengths.least - 1, *(lengths.quantile(q) for q in np.linspace(0.01, 0.99, 60)), lengths.most]
    best = max(evaluate(fleet, wanted, t, n).requests_per_s for t in thresholds for n in range(near))
    assert found.requests_per_s >= best * (1 - 1e-3)


def test_two_far_sites_add_up():
    lengths = uniform(1000, 50_000)
    one = FarPool(name="a", profile=profile(0.4, 4e-5), instances=4, link_bytes_per_s=1e10)
    halves = tuple(FarPool(name=name, profile=one.profile, instances=2, link_bytes_per_s=5e9) for name in ("a", "b"))
    near = profile(0.5, 1e-4)
    together = best_split(Fleet(near=near, near_instances=6, far=(one,)), demand(lengths))
    apart = best_split(Fleet(near=near, near_instances=6, far=halves), demand(lengths))
    assert apart.requests_per_s == pytest.approx(together.requests_per_s)


def test_of_equal_thresholds_the_one_with_less_traffic_is_taken():
    fleet = Fleet(
        near=profile(0.1, 1e-6),
        near_instances=4,
        far=(FarPool(name="far", profile=profile(0.1, 1e-6), instances=4, link_bytes_per_s=1e10),),
    )
    found = best_threshold(fleet, demand(uniform(1000, 50_000)), 3)
    assert found.bound == "decode"
    assert found.far_share == 0.0


def test_a_single_length_is_near_or_far():
    fleet = Fleet(
        near=profile(0.5, 1e-4),
        near_instances=3,
        far=(FarPool(name="far", profile=profile(0.4, 4e-5), instances=8, link_bytes_per_s=1e10),),
    )
    found = best_split(fleet, demand(observed([20_000.0])))
    assert found.far_share == 1.0
    assert found.near_decode == 3


@settings(max_examples=12)
@given(rate=st.floats(0.2, 4.0), far_price=st.floats(0.3, 6.0), gbit=st.floats(1, 100))
def test_no_smaller_purchase_serves_the_demand(rate: float, far_price: float, gbit: float):
    wanted = demand(lognormal(9.9, 1.0, 128, 131_072))
    near = NearOffer(profile=profile(0.47, 1.3e-4, 3e-10), instances=8, price=1.0)
    offer = FarOffer(
        name="far", profile=profile(0.4, 4.2e-5, 1e-10), instances=4, price=far_price, link_bytes_per_s=gbit * 1e9 / 8
    )
    bought = cheapest(near, (offer,), wanted, rate)
    found: list[float] = []
    for n in range(1, 9):
        for m in range(5):
            pool = FarPool(name="far", profile=offer.profile, instances=m, link_bytes_per_s=offer.link_bytes_per_s)
            fleet = Fleet(near=near.profile, near_instances=n, far=(pool,))
            if best_split(fleet, wanted).requests_per_s >= rate * 1.001:
                found.append(n + m * far_price)
    if bought is None:
        assert not found
    else:
        assert bought.price <= min(found, default=float("inf")) + 1e-9
