"""Why cross-site prefill does not pay: each cause is named where it is one, and only there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farfill.planner.answer import Answer
from farfill.planner.capacity import plan_capacity
from farfill.planner.causes import causes_of
from farfill.planner.problem import read_problem

PROFILE = """\
name: {name}
source: made for a test
prefill_formula: {{fixed_s: 0, per_token_s: {per_token}, source: made for a test}}
decode: [{{batch: 1, context_tokens: 1, step_s: 0.01}}]
max_batch: 64
"""
PLAN = """\
model: {{name: tiny, kv_sizes: [{{tokens: 1000, mib: 50}}, {{tokens: 100000, mib: 5000}}]}}
workload:
  input: {{distribution: uniform, min_tokens: 1000, max_tokens: 20000}}
  output_tokens: 20
  context_tokens: 1000
  {demand}
slo: {{tpot_ms: 20{ttft}}}
near: near
sites:
  near: {{instances: 60, profile: near.yaml, price_per_instance_hour: 1}}
  far: {{instances: 20, profile: far.yaml, price_per_instance_hour: {price}}}
links:
  - {{source: far, gbit_per_s: {gbit}, rtt_ms: {rtt}, compression: 2}}
"""


def plan_path(folder: Path, **given: object) -> Path:
    (folder / "near.yaml").write_text(PROFILE.format(name="near", per_token=0.0001))
    (folder / "far.yaml").write_text(PROFILE.format(name="far", per_token=given.pop("far_per_token", 0.00002)))
    values = {"demand": "requests_per_s: 10", "ttft": "", "price": 2, "gbit": 400, "rtt": 1} | given
    (folder / "plan.yaml").write_text(PLAN.format(**values))
    return folder / "plan.yaml"


def answer(folder: Path, **given: object) -> Answer:
    return plan_capacity(read_problem(plan_path(folder, **given)))


def test_what_pays_is_not_explained_away(tmp_path: Path) -> None:
    found = answer(tmp_path)
    assert found.pays
    assert "more for the money than one site. Prompts of more than" in found.verdict


@pytest.mark.parametrize("demand", ["requests_per_s: 10", "arrival_scv: 1"])
def test_a_price_that_decides_is_named_and_no_link_is_blamed(tmp_path: Path, demand: str) -> None:
    found = answer(tmp_path, price=50, demand=demand)
    assert not found.pays
    assert found.verdict.startswith("Keep prefill in the room")
    named = re.search(r"if an instance at far cost at most ([\d.]+) an hour instead of 50", found.verdict)
    assert named is not None, found.verdict
    assert "with links" not in found.verdict
    # What is named is true: at that price it pays, at a tenth more it does not.
    assert answer(tmp_path, price=float(named[1]) * 0.98, demand=demand).pays
    assert not answer(tmp_path, price=float(named[1]) * 1.1, demand=demand).pays


def test_a_link_that_decides_is_named_with_what_would_do(tmp_path: Path) -> None:
    found = answer(tmp_path, gbit=0.5)
    assert not found.pays
    named = re.search(r"It would pay with links of (\d+) Gbit/s instead of 0.5", found.verdict)
    assert named is not None, found.verdict
    assert answer(tmp_path, gbit=int(named[1]) + 1).pays


def test_a_ttft_limit_that_decides_is_named(tmp_path: Path) -> None:
    """A round trip longer than the limit: no far prompt is in time, whatever link or price."""
    found = answer(tmp_path, ttft=", ttft_s: 4, quantile: 0.99", rtt=6000)
    assert not found.pays
    assert not any(part.instances for part in found.plan.far)  # the near site alone is in time
    assert found.plan.goodput_per_s >= 0.99 * 10
    assert "It would pay without slo.ttft_s." in found.verdict


def test_far_instances_that_help_at_no_price_are_told_as_such(tmp_path: Path) -> None:
    """One near instance does it all: there is nothing to take from it."""
    found = answer(tmp_path, demand="requests_per_s: 0.001", far_per_token=0.1, ttft=", ttft_s: 30")
    assert not found.pays
    assert "Not even free far instances over links without limit" in found.verdict


def test_nothing_bought_far_has_no_knee(tmp_path: Path) -> None:
    found = answer(tmp_path, price=50)
    assert not any(part.instances for part in found.plan.far)
    assert found.link is None
    assert " 0 Gbit/s" not in found.verdict


def test_causes_are_those_that_alone_would_do(tmp_path: Path) -> None:
    causes = causes_of(read_problem(plan_path(tmp_path, price=50, gbit=0.5)))
    assert causes.link is None  # not by a link alone: the price is too high
    assert causes.together


def test_one_site_that_is_larger_than_the_near_one_is_told_as_such(tmp_path: Path) -> None:
    path = plan_path(tmp_path, price=50)
    path.write_text(path.read_text().replace("near: {instances: 60", "near: {instances: 8"))
    found = plan_capacity(read_problem(path))
    assert any(part.instances for part in found.plan.far)  # eight do not suffice
    assert "less than one site of 15 instances; near has 8 now" in found.verdict
