"""Whole runs: reproducible, complete, and with every trouble counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from farfill.planner.answer import write_answer
from farfill.planner.capacity import plan_capacity
from farfill.planner.problem import read_problem
from farfill.simulator.report import draw_result
from farfill.simulator.run import Result, simulate
from farfill.simulator.scenario import read_scenario
from unit.simulator.scenes import PLAN, SCENARIO, read, scene


def run(folder: Path, text: str = SCENARIO) -> Result:
    return simulate(read(folder, text))


def unfinished(result: Result) -> int:
    return sum(result.refused.values()) + sum(result.failed.values())


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    text = SCENARIO + "traffic: {arrivals: mmpp, sessions: {turns: 3}, tenants: 4}\nfailures: {mean_up_s: 200}\n"
    first, again = run(tmp_path, text), run(tmp_path, text)
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert msgspec.json.encode(run(tmp_path, text + "seed: 2\n")) != msgspec.json.encode(first)


def test_an_idle_fleet_takes_prefill_transfer_and_one_step(tmp_path: Path) -> None:
    fixed = "input: {distribution: fixed, tokens: 10241}"
    text = SCENARIO + f"traffic: {{arrivals: even, requests_per_s: 0.1, {fixed}}}\n"
    result = run(tmp_path, text.replace("600", "50"))
    kv = 50 * 2**20 * 10.241
    last = kv / 10  # the last of ten chunks is what cannot be hidden
    expected = 0.02 + 10240 * 0.00005 + last / (20e9 / 8) + 0.01
    assert result.ttft.p50_s == pytest.approx(expected, rel=0.02)
    assert result.tpot.p50_s == pytest.approx(0.01, rel=1e-6)
    assert result.offload_share == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_whatever_dies(tmp_path: Path, seed: int) -> None:
    text = f"{SCENARIO}seed: {seed}\nfailures: {{mean_up_s: 60, repair_s: 20}}\n"
    text += "traffic: {arrivals: gamma, sessions: {turns: 3, think_s: 2}, shared_prefix: {tokens: 2048, groups: 3}}\n"
    text += "links: {far: {loss: 0.01, congestion: cubic, fluctuation: 0.3}}\n"
    text += "events: [{at_s: 50, for_s: 30, link: far}]\n"
    result = run(tmp_path, text)
    assert result.finished + unfinished(result) == result.requests
    assert result.fallbacks
    assert set(result.failed) <= {"decode_lost"}


def test_a_cut_link_opens_breakers_and_prompts_stay_near(tmp_path: Path) -> None:
    text = SCENARIO + "events: [{at_s: 100, for_s: 60, link: far}]\n"
    result = run(tmp_path, text)
    assert result.fallbacks["link_lost"] > 0
    assert result.finished + unfinished(result) == result.requests
    during = [t for at, t in zip(result.at_s, result.series["threshold"], strict=True) if 112 < at < 155]
    assert min(during) > 2 * result.threshold_tokens, "while the link is cut hardly anything should go far"
    assert result.offload_share > 0.4, "and after that, as much as before"


def test_an_overloaded_near_pool_brings_the_threshold_down(tmp_path: Path) -> None:
    result = run(tmp_path, SCENARIO.replace("8000}", "19000, research_period_s: 10}") + "seed: 2\n")
    assert result.threshold_searches > 0
    assert result.threshold_tokens < 15_000


def test_failures_open_breakers_and_prompts_stay_near(tmp_path: Path) -> None:
    text = SCENARIO.replace("8000}", "8000, adapt_threshold: false, utilisation_limit: 1}")
    result = run(tmp_path, text + "events: [{at_s: 100, for_s: 60, link: far}]\n")
    assert result.placements["breaker_open"] > 0
    assert result.finished + unfinished(result) == result.requests


def test_a_dead_far_instance_is_replaced_by_another(tmp_path: Path) -> None:
    text = SCENARIO + "events: [{at_s: 100, for_s: 60, instance: far-prefill-0}]\n"
    result = run(tmp_path, text)
    assert result.finished == result.requests
    assert min(result.series["instances: far prefill"]) == 1


def test_without_budget_prompts_that_belong_far_are_refused(tmp_path: Path) -> None:
    text = SCENARIO.replace("8000}", "8000, fallback_budget: {tokens_per_s: 0}}")
    result = run(tmp_path, text + "events: [{at_s: 100, link: far}]\n")
    assert result.refused["fallback_tokens"] > 0


def test_conversations_find_their_prefix_again(tmp_path: Path) -> None:
    single = run(tmp_path)
    talks = run(tmp_path, SCENARIO + "traffic: {sessions: {turns: 5, think_s: 5}}\n")
    assert single.cached_tokens == 0
    assert talks.cached_tokens > 0.3 * talks.prompt_tokens


def test_too_much_traffic_waits_in_admission_and_is_turned_away(tmp_path: Path) -> None:
    text = SCENARIO.replace("8000}", "8000, admission: {max_running: 5, max_waiting: 20, deadline_s: 10}}")
    result = run(tmp_path, text + "traffic: {requests_per_s: 30}\n")
    assert sum(result.refused.values()) > 0
    assert set(result.refused) <= {"shed", "queue_full", "queue_deadline"}
    assert max(result.series["queue: admission"]) > 0


def test_without_near_prefill_decode_instances_prefill_and_their_streams_slow_down(tmp_path: Path) -> None:
    text = SCENARIO.replace("near_prefill: 1", "near_prefill: 0").replace("8000", "100000, adapt_threshold: false")
    result = run(tmp_path, text)
    assert result.offload_share == 0.0
    assert result.finished == result.requests
    assert result.tpot.p90_s > 0.011


def test_an_automatic_rollout_grows_step_by_step(tmp_path: Path) -> None:
    rollout = "rollout: {percent: 10, automatic: true, min_step_s: 20, min_requests: 5}"
    text = SCENARIO.replace("8000}", f"8000, {rollout}}}").replace("600", "1500")
    result = run(tmp_path, text.replace("near_prefill: 1", "near_prefill: 3"))
    assert [percent for _, percent, _ in result.rollout] == [50.0, 100.0]
    assert result.placements["rollout"] > 0


def test_a_baseline_gives_instances_threshold_and_rate(tmp_path: Path) -> None:
    path = scene(tmp_path, "plan: plan.yaml\nbaseline: plan.json\nrequests: 300\n")
    answer = plan_capacity(read_problem(tmp_path / "plan.yaml"))
    write_answer(tmp_path / "plan.json", answer)
    scenario = read_scenario(path)
    assert scenario.fleet.near_decode == answer.plan.near_decode
    assert scenario.rate_per_s == answer.rate_per_s
    result = simulate(scenario)
    assert result.finished == 300
    assert result.throughput_per_s == pytest.approx(answer.rate_per_s, rel=0.2)


def test_a_trace_is_replayed_at_its_own_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {i * 1000}, "input_length": 4096, "output_length": 3, "hash_ids": [1, 2, 3, 4, {i + 100}]}}'
        for i in range(10)
    ]
    trace.write_text("\n".join(lines))
    scenario = read_scenario(scene(tmp_path), replay=trace)
    result = simulate(replace(scenario, file=scenario.file.model_copy(update={"warmup": 0.0})))
    assert result.finished == 10
    assert result.simulated_s >= 9.0
    assert result.cached_tokens == 9 * 4 * 512


def test_a_trace_of_one_moment_has_rates_of_the_time_it_took(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 5, "input_length": 4096, "output_length": 3}\n' * 10)
    scenario = read_scenario(scene(tmp_path), replay=trace)
    result = simulate(replace(scenario, file=scenario.file.model_copy(update={"warmup": 0.0})))
    assert result.finished == 10
    assert result.throughput_per_s * result.simulated_s == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("planned", [0.5, 0.9])
def test_a_search_fills_links_as_far_as_the_plan(tmp_path: Path, planned: float) -> None:
    plan = PLAN.replace("chunk_tokens: 1024", f"chunk_tokens: 1024, link_utilisation: {planned}")
    assert read_scenario(scene(tmp_path, plan=plan)).utilisation_target == planned
    text = SCENARIO.replace("8000}", "8000, utilisation_target: 0.3}")
    assert read_scenario(scene(tmp_path, text, plan=plan)).utilisation_target == 0.3


def test_plots_are_drawn(tmp_path: Path) -> None:
    drawn = draw_result(run(tmp_path, SCENARIO.replace("600", "50")), tmp_path / "plots")
    assert {path.name for path in drawn} == {"ttft.png", "queues.png", "instances.png", "links.png"}
    assert all(path.stat().st_size > 1000 for path in drawn)


def test_a_load_swing_scales_out_and_in_without_flapping(tmp_path: Path) -> None:
    text = SCENARIO.replace("600", "7000").replace("8000}", "8000, surge_queue_s: 5}") + (
        "traffic:\n  requests_per_s: 3\n  load:\n"
        "    - {at_s: 600, factor: 0.4}\n    - {at_s: 1200, factor: 2}\n    - {at_s: 1500, factor: 2}\n"
        "    - {at_s: 1800, factor: 0.4}\n"
        "autoscale:\n  start_s: 60\n  roles:\n"
        "    near/prefill: {minimum: 1, maximum: 8}\n    far/prefill: {minimum: 1, maximum: 8}\n"
    )
    result = run(tmp_path, text)
    assert result.finished == result.requests
    for group in ("near/prefill", "far/prefill"):
        steps = [change.after - change.before for change in result.scaling if change.group == group]
        turns = sum(1 for one, other in pairwise(steps) if (one > 0) != (other > 0))
        assert max(steps) > 0
        assert min(steps) < 0
        assert turns <= 2, f"{group} flaps: {steps}"
    counts = result.series["instances: far prefill"]
    assert max(counts) > counts[-1]


def test_a_schedule_opens_the_far_site_for_the_night(tmp_path: Path) -> None:
    text = SCENARIO.replace("600", "1200").replace("8000}", "8000, adapt_threshold: false}") + (
        "traffic: {requests_per_s: 0.3}\nautoscale:\n  start_s: 30\n  cooldown_in_s: 60\n  roles:\n"
        "    far/prefill: {minimum: 1, maximum: 2}\n"
        "  schedules: [{group: far/prefill, start: '00:10', end: '00:40', minimum: 5, maximum: 6}]\n"
    )
    result = run(tmp_path, text)
    counts = dict(zip(result.at_s, result.series["instances: far prefill"], strict=True))
    assert max(count for at_s, count in counts.items() if at_s < 600) <= 2
    assert min(count for at_s, count in counts.items() if 700 < at_s < 2400) >= 5
    assert max(count for at_s, count in counts.items() if at_s > 2700) <= 2
    assert result.finished == result.requests
