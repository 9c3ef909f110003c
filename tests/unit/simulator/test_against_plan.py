"""A plan and a simulation of the same thing say much the same: they agree on arrivals, lengths and what waits."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from farfill.planner.capacity import plan_capacity
from farfill.planner.problem import read_problem
from farfill.simulator.report import print_result
from farfill.simulator.run import Result, simulate
from farfill.simulator.scenario import read_scenario
from unit.simulator.scenes import PLAN, SCENARIO, scene

PLANNED = "plan: plan.yaml\nrequests: 6000\npolicies: {research_period_s: 30}\n"
BUSY = (
    PLAN.replace("requests_per_s: 1.5", "requests_per_s: 2.5")
    .replace("gbit_per_s: 20", "gbit_per_s: 40")
    .replace("far: {instances: 4", "far: {instances: 1")
)


def with_scv(scv: float) -> str:
    return BUSY.replace("  output_tokens: 20\n", f"  output_tokens: 20\n  arrival_scv: {scv}\n")


@pytest.mark.parametrize("scv", [0.1, 1])
def test_times_to_first_token_are_those_of_the_plan(tmp_path: Path, scv: float) -> None:
    path = scene(tmp_path, PLANNED, plan=with_scv(scv))
    plan = plan_capacity(read_problem(tmp_path / "plan.yaml")).plan
    assert 0 < plan.far_share < 1
    assert plan.near_prefill > 0  # as in the simulation, which would otherwise prefill on decode instances
    found = simulate(read_scenario(path))
    assert plan.ttft_queued.mean_s is not None
    assert plan.ttft_queued.p90_s is not None
    assert found.ttft.mean_s == pytest.approx(plan.ttft_queued.mean_s, rel=0.2)
    assert found.ttft.p90_s == pytest.approx(plan.ttft_queued.p90_s, rel=0.2)


@pytest.mark.parametrize(
    ("scv", "kind", "told"),
    [
        (0.25, "gamma", "gaps with a squared coefficient of variation of 0.25"),
        (1, "poisson", "Poisson"),
        (0.0001, "even", "all gaps equal"),
        (3, "gamma", "gaps with a squared coefficient of variation of 3"),
    ],
)
def test_arrivals_that_are_not_given_are_as_uneven_as_the_plan_says(
    tmp_path: Path, scv: float, kind: str, told: str
) -> None:
    path = scene(tmp_path, SCENARIO, plan=with_scv(scv))
    scenario = read_scenario(path, requests=20)
    assert scenario.file.traffic.arrivals == kind
    assert simulate(scenario).arrivals == told
    path.write_text(SCENARIO + "traffic: {arrivals: mmpp}\n")
    assert read_scenario(path).file.traffic.arrivals == "mmpp"


def test_an_even_trace_is_simulated_evenly(tmp_path: Path) -> None:
    lines = [{"timestamp": 500 * i, "input_length": 2000 + 100 * (i % 90), "output_length": 20} for i in range(300)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    start = PLAN.index("  input:")
    plan = PLAN[:start] + "  trace: t.jsonl\n" + PLAN[PLAN.index("  context_tokens:") :]
    assert read_scenario(scene(tmp_path, SCENARIO, plan=plan)).file.traffic.arrivals == "even"


def test_a_threshold_is_searched_again_without_pressure_and_finds_back(tmp_path: Path) -> None:
    """Lengths of a heavy moment put it too high; when others came since, it is searched on those."""
    quiet = "traffic: {requests_per_s: 0.5}\n"
    off = SCENARIO.replace("8000}", "18000, window_lengths: 256}")
    result = simulate(read_scenario(scene(tmp_path, off + quiet)))
    assert result.first_threshold_tokens == 18000
    assert 2 <= result.threshold_searches <= 10
    assert result.threshold_tokens < 16_000


def told(found: Result) -> str:
    text = io.StringIO()
    print_result(Console(file=text, width=160), found)
    return text.getvalue()


def test_a_compressed_link_is_told_on_the_wire_too(tmp_path: Path) -> None:
    text = SCENARIO.replace("600", "60")
    found = simulate(
        read_scenario(scene(tmp_path, text, plan=PLAN.replace("rtt_ms: 20", "rtt_ms: 20, compression: 2")))
    )
    assert found.links[0].wire_gbit_per_s == pytest.approx(found.links[0].gbit_per_s / 2)
    assert f"Gbit/s of KV ({found.links[0].wire_gbit_per_s:.3g} on the wire)" in told(found)
    plain = simulate(read_scenario(scene(tmp_path, text)))
    assert "on the wire" not in told(plain)
    assert "arrivals: Poisson" in told(plain)


def test_a_fleet_without_far_instances_has_no_threshold(tmp_path: Path) -> None:
    text = SCENARIO.replace("600", "30").replace(", far: {far: 2}", "")
    assert "none: nothing goes far" in told(simulate(read_scenario(scene(tmp_path, text))))
