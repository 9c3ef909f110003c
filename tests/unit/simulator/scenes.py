"""Small scenarios for tests, written as people write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from farfill.planner.lengths import Lengths, observed
from farfill.simulator.scenario import Scenario, read_scenario

NEAR = """\
name: near
source: made for a test
prefill_formula: {fixed_s: 0, per_token_s: 0.0001, source: made for a test}
decode: [{batch: 1, context_tokens: 1, step_s: 0.01}]
max_batch: 512
"""
FAR = NEAR.replace("name: near", "name: far").replace("0.0001", "0.00005")
PLAN = """\
model: {name: tiny, kv_sizes: [{tokens: 1000, mib: 50}, {tokens: 100000, mib: 5000}]}
workload:
  input: {distribution: uniform, min_tokens: 1000, max_tokens: 20000}
  output_tokens: 20
  context_tokens: 1000
  requests_per_s: 1.5
slo: {tpot_ms: 20, ttft_s: 5}
near: near
sites:
  near: {instances: 4, profile: near.yaml}
  far: {instances: 4, profile: far.yaml}
links:
  - {source: far, gbit_per_s: 20, rtt_ms: 20}
planning: {chunk_tokens: 1024}
"""
SCENARIO = """\
plan: plan.yaml
requests: 600
fleet: {near_prefill: 1, near_decode: 2, far: {far: 2}}
policies: {threshold_tokens: 8000}
"""


def scene(folder: Path, text: str = SCENARIO, *, plan: str = PLAN, near: str = NEAR) -> Path:
    """The path of a scenario with all files it needs beside it."""
    (folder / "near.yaml").write_text(near)
    (folder / "far.yaml").write_text(FAR)
    (folder / "plan.yaml").write_text(plan)
    path = folder / "scenario.yaml"
    path.write_text(text)
    return path


def read(folder: Path, text: str = SCENARIO) -> Scenario:
    """The scenario, read."""
    return read_scenario(scene(folder, text))


def queue(folder: Path, lengths: Lengths, *, rate_per_s: float, servers: int, requests: int) -> Scenario:
    """Poisson arrivals before so many prefill instances, where 10,000 tokens take a second; decode takes no time."""
    text = f"""\
plan: plan.yaml
requests: {requests}
seed: 3
fleet: {{near_prefill: {servers}, near_decode: 1}}
traffic: {{requests_per_s: {rate_per_s}, output: {{distribution: fixed, tokens: 1}}}}
policies: {{knows: exact, prefill_weights: {{least_work: 1}}}}
monitor_s: 1000
warmup: 0
"""
    path = scene(folder, text, near=NEAR.replace("0.01}", "0.000001}"))
    return replace(read_scenario(path), input=lengths)


def exponential_lengths(mean: float) -> Lengths:
    """Quantiles of an exponential distribution, scaled to this very mean."""
    shares = (np.arange(1 << 15) + 0.5) / (1 << 15)
    values = -np.log1p(-shares)
    return observed([float(v) for v in values * mean / values.mean()])
