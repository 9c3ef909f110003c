"""A seed gives the same run from version to version: making the simulator faster must not change what it says.

`same_results.json` has what each of these runs came to. Write it anew (`python -m unit.simulator.test_same_results`
with `tests` on the path) only for a change that is meant to change results, and say so in its commit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farfill.simulator.run import Result, simulate
from farfill.simulator.scenario import read_scenario
from unit.simulator.scenes import SCENARIO, scene

KEPT = Path(__file__).with_name("same_results.json")
TRAFFIC = "arrivals: gamma, sessions: {turns: 3, think_s: 2, share: 0.5}, shared_prefix: {tokens: 2048, groups: 3}"
RUNS = {
    "plain": SCENARIO,
    "everything": (
        f"{SCENARIO}seed: 7\ntraffic: {{{TRAFFIC}, tenants: 4}}\n"
        "failures: {mean_up_s: 90, repair_s: 20}\n"
        "links: {far: {loss: 0.01, congestion: cubic, fluctuation: 0.3}}\n"
        "events: [{at_s: 50, for_s: 30, link: far}, {at_s: 120, for_s: 20, instance: far-prefill-0}]\n"
    ),
    "no near prefill": SCENARIO.replace("near_prefill: 1", "near_prefill: 0") + f"traffic: {{{TRAFFIC}}}\n",
    "bursts, rollout, limits": SCENARIO.replace(
        "8000}",
        "8000, rollout: {percent: 10, automatic: true, min_step_s: 20, min_requests: 5},"
        " admission: {max_running: 8, max_waiting: 20, deadline_s: 10, tenant_requests_per_s: 2}}",
    )
    + "traffic: {arrivals: mmpp, tenants: 3}\n",
    "scaling": (
        SCENARIO.replace("600", "2000")
        + "traffic: {requests_per_s: 3, load: [{at_s: 100, factor: 0.4}, {at_s: 300, factor: 2}]}\n"
        + "autoscale:\n  start_s: 20\n  period_s: 10\n  cooldown_in_s: 60\n  roles:\n"
        + "    near/prefill: {minimum: 1, maximum: 8}\n    far/prefill: {minimum: 1, maximum: 8}\n"
        + "    near/decode: {minimum: 1, maximum: 4}\n  convert: [near]\n"
    ),
}


def summed_up(result: Result) -> dict[str, Any]:
    """All of a result, long series by their sums."""
    found: dict[str, Any] = msgspec.to_builtins(result)
    found["series"] = {name: sum(values) for name, values in found["series"].items()}
    found["at_s"], found["ttft_s"] = sum(found["at_s"]), sum(found["ttft_s"])
    return found


def run(name: str, folder: Path) -> dict[str, Any]:
    """One of RUNS."""
    return summed_up(simulate(read_scenario(scene(folder, RUNS[name]))))


def close(found: Any, kept: Any) -> bool:
    """Equal, but for the last digits of numbers, which differ between processors."""
    if isinstance(kept, dict):
        return found.keys() == kept.keys() and all(close(found[key], kept[key]) for key in kept)
    if isinstance(kept, list):
        return len(found) == len(kept) and all(map(close, found, kept))
    return found == (pytest.approx(kept, rel=1e-7, abs=1e-9) if isinstance(kept, float) else kept)


@pytest.mark.parametrize("name", RUNS)
def test_a_seed_gives_what_it_always_gave(name: str, tmp_path: Path) -> None:
    found, kept = run(name, tmp_path), json.loads(KEPT.read_text())[name]
    differing = {key: (found.get(key), kept[key]) for key in kept if not close(found.get(key), kept[key])}
    assert not differing


if __name__ == "__main__":
    kept = {}
    for each in RUNS:
        with tempfile.TemporaryDirectory() as place:
            kept[each] = run(each, Path(place))
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    sys.stdout.write(f"{KEPT}\n")
