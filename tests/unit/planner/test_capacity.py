"""Capacity answers end to end: from plan files, with the mistakes people make."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from farfill.config.load import load_config
from farfill.core.errors import ConfigError
from farfill.planner.answer import Answer, read_answer, write_answer
from farfill.planner.capacity import PlanImpossibleError, plan_capacity
from farfill.planner.capacity_report import draw_answer
from farfill.planner.cluster_file import write_cluster_file
from farfill.planner.problem import read_problem
from unit.planner.published import MODELS

EXAMPLES = Path(__file__).parents[3] / "examples" / "planning"
_SIZES = "  kv_sizes: [{tokens: 1000, mib: 190}, {tokens: 100000, mib: 1850}]\n"
PLAN = """\
model:
  name: hybrid
  kv_sizes: [{tokens: 1000, mib: 190}, {tokens: 100000, mib: 1850}]
workload:
  input: {distribution: lognormal, mu: 9.9, sigma: 1.0, min_tokens: 128, max_tokens: 131072}
  output_tokens: 1024
  context_tokens: 28000
  requests_per_s: 2.0
slo: {tpot_ms: 25}
near: near
sites:
  near: {instances: 20, profile: h20.yaml, price_per_instance_hour: 1.0}
  far: {instances: 8, profile: h200.yaml, price_per_instance_hour: 1.5}
links:
  - {source: far, gbit_per_s: 100, rtt_ms: 20}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("h20", "h200"):
        text = (EXAMPLES / f"{name}-1t-hybrid.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def answer(folder: Path, text: str = PLAN) -> Answer:
    path = folder / "plan.yaml"
    path.write_text(text)
    return plan_capacity(read_problem(path))


def edited(**edits: str) -> str:
    """PLAN with the line that starts with each key replaced."""
    lines = [
        next((new for key, new in edits.items() if line.strip().startswith(f"{key}:")), line)
        for line in PLAN.splitlines()
    ]
    return "\n".join(line for line in lines if line) + "\n"


def test_a_demand_is_met_with_headroom_and_no_more(folder: Path):
    found = answer(folder)
    plan = found.plan
    assert plan.capacity_per_s >= 2.6 * 0.999
    assert plan.near_decode == 4  # 2.6 requests/s of 0.781 each
    assert found.pays
    assert "Cross-site prefill pays" in found.verdict
    alone = next(option for option in found.alternatives if option.name == "one site")
    assert alone.price_per_hour > plan.price_per_hour
    assert plan.ttft_queued.mean_s is not None
    assert plan.ttft_unloaded.mean_s is not None
    assert plan.ttft_queued.mean_s >= plan.ttft_unloaded.mean_s
    assert plan.tpot_s == pytest.approx(0.025)
    assert plan.goodput_per_s == pytest.approx(2.0)
    assert [option.name for option in found.alternatives] == ["one site", "all prefill far", "near site without far"]


def test_without_a_demand_all_instances_run(folder: Path):
    found = answer(folder, edited(requests_per_s=""))
    assert found.plan.near_prefill + found.plan.near_decode == 20
    assert found.rate_per_s == pytest.approx(found.plan.capacity_per_s / 1.3)
    alone = next(option for option in found.alternatives if option.name == "one site")
    assert alone.near_prefill + alone.near_decode == 32  # 20 and 8 × 1.5
    assert found.gain_at_equal_cost == pytest.approx(found.plan.capacity_per_s / alone.capacity_per_s)
    assert found.gain_at_equal_cost > 1.1
    assert found.pays


def test_times_at_the_mean_length_promise_more(folder: Path):
    mean = answer(folder, edited(requests_per_s="") + "planning: {times_at: mean_length}\n")
    everything = answer(folder, edited(requests_per_s=""))
    assert 1.0 < mean.plan.capacity_per_s / everything.plan.capacity_per_s < 1.1
    # What is promised from all times can be served without a pool being overloaded; the other cannot.
    near = everything.plan.near_prefill_per_s / (1 - everything.plan.far_share)
    assert near >= everything.plan.capacity_per_s * 0.999


def test_a_ttft_limit_buys_more(folder: Path):
    calm = answer(folder, edited(requests_per_s="  requests_per_s: 4.0"))
    limit = "slo: {tpot_ms: 25, ttft_s: 4.0, quantile: 0.9}"
    hurried = answer(folder, edited(requests_per_s="  requests_per_s: 4.0", slo=limit))
    assert hurried.plan.goodput_per_s >= 0.9 * 4.0
    assert hurried.plan.price_per_hour > calm.plan.price_per_hour
    assert calm.plan.ttft_queued.p90_s is not None
    assert calm.plan.ttft_queued.p90_s > 4.0
    assert hurried.plan.most_goodput_per_s < hurried.plan.capacity_per_s


def test_a_dense_model_is_told_to_stay_in_the_room(folder: Path):
    (folder / "config.json").write_text(json.dumps(MODELS["MiniMax-M2.5"].config))
    text = edited(kv_sizes="  config: config.json").replace("gbit_per_s: 100", "gbit_per_s: 10")
    found = answer(folder, text)
    assert not found.pays
    assert found.verdict.startswith("Keep prefill in the room")
    assert "It would pay with links of" in found.verdict
    assert "Your model is dense" in found.verdict
    assert found.link is None  # nothing far is bought, so no link has a knee


def test_a_dense_model_over_a_link_is_named_dense(folder: Path):
    (folder / "config.json").write_text(json.dumps(MODELS["MiniMax-M2.5"].config))
    text = edited(kv_sizes="  config: config.json", requests_per_s="").replace("gbit_per_s: 100", "gbit_per_s: 10")
    found = answer(folder, text)
    assert not found.pays
    assert "Your model is dense: 100% of its layers" in found.verdict
    assert found.link is not None
    assert found.link.knee_gbit_per_s > 10 * found.link.cases[0].factor


def test_a_trace_gives_lengths_rate_and_burstiness(folder: Path):
    lines = [
        json.dumps({"timestamp": 500 * i, "input_length": 4000 + 400 * (i % 50), "output_length": 256, "hash_ids": [i]})
        for i in range(400)
    ]
    (folder / "trace.jsonl").write_text("\n".join(lines))
    found = answer(folder, edited(input="  trace: trace.jsonl", output_tokens="", requests_per_s="", context_tokens=""))
    assert found.demand_per_s == pytest.approx(2.0)
    assert found.mean_output_tokens == 256
    assert "400 requests over 200 s, 0% of input tokens cached" in found.workload


@pytest.mark.parametrize(
    ("times", "rate", "told"),
    [
        ([0], "", ["one request, so neither a rate", "set workload.requests_per_s"]),
        ([0], "  requests_per_s: 2.0", ["one request, so neither a rate"]),
        ([7, 7, 7], "", ["3 requests, all at one time, so neither a rate", "set workload.requests_per_s"]),
        (range(0, 9000, 500), "  requests_per_s: 2.0", ["more evenly than from users", "workload.arrival_scv: 1"]),
        ([0, 10, 5000, 5010, 9000, 9001], "  requests_per_s: 2.0", []),
        ([9000, 10, 5000, 5010, 0, 9001], "  requests_per_s: 2.0", ["not in order of time (2 of 6 lines"]),
    ],
)
def test_what_a_trace_cannot_tell_is_warned_of(folder: Path, times: Iterable[int], rate: str, told: list[str]):
    lines = [{"timestamp": at, "input_length": 9000 + i, "output_length": 256} for i, at in enumerate(times)]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = edited(input="  trace: trace.jsonl", output_tokens="", requests_per_s=rate, context_tokens="")
    found = " ".join(answer(folder, text).warnings)
    assert bool(found) == bool(told)
    assert all(part in found for part in told), found
    assert ("requests_per_s" in found) == (rate == "")


def test_the_answer_survives_its_file(folder: Path):
    found = answer(folder)
    write_answer(folder / "baseline.json", found)
    assert read_answer(folder / "baseline.json") == found


@pytest.mark.parametrize(("text", "told"), [("{}", "no capacity baseline"), ("x", "no capacity baseline")])
def test_a_broken_baseline_is_refused(tmp_path: Path, text: str, told: str):
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_answer(tmp_path / "b.json")


def test_a_baseline_of_another_version_is_refused(folder: Path):
    write_answer(folder / "b.json", answer(folder))
    (folder / "b.json").write_text((folder / "b.json").read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ConfigError, match="a baseline of version 9, this is 1"):
        read_answer(folder / "b.json")


def test_the_cluster_file_is_valid(folder: Path):
    path = folder / "plan.yaml"
    path.write_text(PLAN + "planning: {link_utilisation: 0.97}\n")
    problem = read_problem(path)
    found = plan_capacity(problem)
    write_cluster_file(folder / "cluster.yaml", problem, found)
    config = load_config(folder / "cluster.yaml").config
    plan = found.plan
    assert len(config.workers) == plan.near_prefill + plan.near_decode + plan.far[0].instances
    assert config.routing.remote_prefill_threshold_tokens == plan.threshold_tokens
    assert (config.routing.link_utilisation_target, config.routing.link_utilisation_limit) == (0.97, 0.97)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plots_are_drawn(folder: Path, suffix: str):
    draw_answer(answer(folder), folder / f"plan.{suffix}")
    head = (folder / f"plan.{suffix}").read_bytes()[:200]
    assert head.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("gbit_per_s: 100", "gbit_per_s: 0", "plan.yaml:15: links.0.gbit_per_s: 0 is out of range; give more than 0"),
        ("instances: 20", "instances: -1", "plan.yaml:12: sites.near.instances: -1 is out of range; give at least 0"),
        ("min_tokens: 128", "min_tokens: -128", "workload.input.min_tokens: -128 is out of range; give at least"),
        ("min_tokens: 128", "min_tokens: 200000", "workload.input.min_tokens: min_tokens 200000 is more than"),
        ("mu: 9.9", "mu: 19.9", "plan.yaml:5: workload.input.mu: a log-normal with mu 19.9"),
        ("near: near", "near: here", "plan.yaml:10: near: 'here' is not one of the sites; give one of: near, far"),
        ("source: far", "source: moon", "plan.yaml:15: links.0.source: 'moon' is no far site; far sites: far"),
        ("h200.yaml", "none.yaml", "none.yaml: cannot be read"),
        ("profile: h200.yaml", "accelerator: H200", "sites.far.accelerator: an estimate needs model.config"),
        ("profile: h20.yaml", "profile: h200.yaml", "sites.near: profile h200-x8 has no decode steps"),
        ("tpot_ms: 25", "tpot: 25", "slo.tpot: unknown key; did you mean tpot_ms?"),
        ("  output_tokens: 1024\n", "", "plan.yaml:4: workload: output_tokens is missing"),
        ("distribution: lognormal", "distribution: normal", "plan.yaml:5: workload.input"),
        (_SIZES, "", "model: neither config nor kv_sizes"),
        ("links:\n  - {source: far, gbit_per_s: 100, rtt_ms: 20}\n", "", "sites.far: no link leads from here"),
    ],
)  # fmt: skip
def test_mistakes_name_line_and_key(folder: Path, old: str, new: str, told: str):
    with pytest.raises(ConfigError) as caught:
        answer(folder, PLAN.replace(old, new, 1))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ({"slo": "slo: {tpot_ms: 1}"}, "slo.tpot_ms: 1 ms cannot be reached: one sequence alone takes 25.0 ms"),
        ({"slo": "slo: {tpot_ms: 25, ttft_s: 0.1}"}, "slo.ttft_s: 0.1 s for 90% of requests cannot be reached"),
        (
            {"requests_per_s": "  requests_per_s: 100"},
            "workload.requests_per_s: 100 requests/s with 30% headroom are 130.00",
        ),
        ({"near": "near: near", "requests_per_s": ""}, ""),
    ],
)
def test_what_cannot_be_reached_is_named(folder: Path, edits: dict[str, str], told: str):
    text = edited(**{key: new for key, new in edits.items() if key != "near"})
    if not told:
        text, told = text.replace("instances: 20", "instances: 0"), "nothing can be served"
    with pytest.raises(PlanImpossibleError) as caught:
        answer(folder, text)
    assert told in str(caught.value)


def test_no_far_site_is_an_answer_too(folder: Path):
    text = PLAN.replace("  far: {instances: 8, profile: h200.yaml, price_per_instance_hour: 1.5}\n", "")
    found = answer(folder, text.replace("links:\n  - {source: far, gbit_per_s: 100, rtt_ms: 20}\n", ""))
    assert not found.pays
    assert found.plan.threshold_tokens is None
    assert found.link is None
    assert "no far site" in found.verdict


def test_prompts_longer_than_a_profile_are_warned_of(folder: Path):
    profile = (folder / "h200.yaml").read_text().replace("fit: quadratic\n", "")
    (folder / "h200.yaml").write_text(profile)
    found = answer(folder)
    assert found.warnings == [
        "profile h200-x8 ends at 128000 tokens, prompts at 131015: times beyond are extrapolated and too short;"
        " measure longer ones"
    ]
