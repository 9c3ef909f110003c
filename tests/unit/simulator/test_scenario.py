"""Mistakes in scenario files are named with line, key and a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from farfill.core.errors import ConfigError
from farfill.simulator.scenario import read_scenario
from unit.simulator.scenes import SCENARIO, scene


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SCENARIO + "sede: 1\n", "5: sede: .*seed"),
        (SCENARIO.replace("{far: 2}", "{moon: 2}"), "3: fleet.far.moon: no far site of the plan; far sites: far"),
        (SCENARIO + "events:\n  - {at_s: 1, link: moon}\n", "6: events.0.link: 'moon' is no far site"),
        (SCENARIO + "events:\n  - {at_s: 1}\n", "6: events.0: needs exactly one of instance and link"),
        (SCENARIO + "events:\n  - {at_s: 1, instance: x}\n", "is no instance; there are: near-decode-0"),
        (SCENARIO + "traffic: {requests_per_s: 0}\n", "5: traffic.requests_per_s: 0 is out of range; give more than 0"),
        (SCENARIO + "traffic: {load: [{at_s: 5, factor: 1}, {at_s: 5, factor: 2}]}\n", "load.1.at_s: not later"),
        (SCENARIO.replace("8000}", "8000, decode_weights: {least_wrok: 1}}"), "did you mean least_work"),
        (SCENARIO + "autoscale: {roles: {far/decode: {minimum: 0, maximum: 1}}}\n", "far/decode: no such role"),
        (SCENARIO + "autoscale: {roles: {near/decode: {minimum: 2, maximum: 1}}}\n", "minimum: more than maximum"),
        (
            SCENARIO + "autoscale: {roles: {near/decode: {minimum: 1, maximum: 1}}, schedules: [{group: far/prefill,"
            " start: '22:00', end: '06:00', minimum: 1, maximum: 2}]}\n",
            "schedules.0.group: 'far/prefill' is no group; there are: near/decode",
        ),
        (SCENARIO + "baseline: gone.json\n", "5: baseline: .*cannot be read"),
        (SCENARIO.replace("plan.yaml", "gone.yaml"), "gone.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_named_with_its_key(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_scenario(scene(tmp_path, text))


def test_a_broken_trace_names_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": -1}\n')
    with pytest.raises(ConfigError, match=r"trace.jsonl:2"):
        read_scenario(scene(tmp_path), replay=trace)
