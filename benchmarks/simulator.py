"""The simulator against closed forms, and how long a million requests take it.

    python benchmarks/simulator.py

Mean waits: M/M/1, M/D/1, M/G/1 (Pollaczek-Khinchine) and M/M/4 (Erlang) through all policies, and transfers on a shared
link against processor sharing, which is the same for every distribution of sizes. The time is CPU time of this process:
what one core takes when nobody else wants it.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from _common import Figures, note, note_machine
from farfill.planner.lengths import Lengths, observed, uniform
from farfill.planner.queueing import wait_in_pool
from farfill.simulator.kernel import Kernel
from farfill.simulator.link import SharedLink
from farfill.simulator.run import simulate
from farfill.simulator.scenario import Scenario, read_scenario
from farfill.simulator.traffic import generator
from farfill.simulator.world import World

ROOT = Path(__file__).parents[1]
LARGE = ROOT / "examples" / "simulation" / "two-sites-sessions.yaml"
MEAN_TOKENS = 10_000
PROFILE = """\
name: queue
source: made for this benchmark
prefill_formula: {fixed_s: 0, per_token_s: 0.0001, source: made for this benchmark}
decode: [{batch: 1, context_tokens: 1, step_s: 0.000001}]
max_batch: 512
"""
PLAN = """\
model: {name: queue, kv_sizes: [{tokens: 1000, mib: 1}]}
workload: {input: {distribution: fixed, tokens: 10000}, output_tokens: 1}
slo: {tpot_ms: 20}
near: near
sites: {near: {instances: 4, profile: near.yaml}}
"""
SCENARIO = """\
plan: plan.yaml
fleet: {near_prefill: 1, near_decode: 1}
traffic: {requests_per_s: 1}
policies: {knows: exact, prefill_weights: {least_work: 1}}
monitor_s: 10000
"""


def main() -> int:
    """Measure and print; 1 when something falls short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the large run")
    parser.add_argument("--queue-requests", type=int, default=300_000, help="of each queue")
    parser.add_argument("--only", choices=["queues", "links", "large"], help="one part only")
    args = parser.parse_args()
    note_machine()
    figures = Figures()
    if args.only in (None, "queues"):
        queues(figures, args.queue_requests)
    if args.only in (None, "links"):
        links(figures, args.queue_requests)
    if args.only in (None, "large"):
        large(figures, args.requests)
    return figures.exit_code


def queues(figures: Figures, requests: int) -> None:
    for name, lengths, servers, load in (
        ("mm1_load_0.5", exponential(), 1, 0.5),
        ("mm1_load_0.7", exponential(), 1, 0.7),
        ("md1_load_0.7", observed([float(MEAN_TOKENS)]), 1, 0.7),
        ("mg1_uniform_load_0.7", uniform(1, 2 * MEAN_TOKENS), 1, 0.7),
        ("mm4_load_0.7", exponential(), 4, 0.7),
    ):
        world = World(queue(lengths, servers, load, requests))
        world.run()
        waits = float(world.records.column("wait").mean())
        # The closed form of the traffic that came: what the drawn sample happens to be is not the queue's error.
        came, seconds = np.sort(world.records.column("arrival")), (world.records.column("prompt") - 1) * 1e-4
        rate, mean = (len(came) - 1) / float(came[-1] - came[0]), float(seconds.mean())
        told = wait_in_pool(rate, servers, mean, float(seconds.var()) / mean**2).overall_s
        note(f"  {name}: {waits:.4f} s, closed form {told:.4f} s")
        figures.at_most(f"{name}_mean_wait_off", abs(waits / told - 1), 0.02)


def links(figures: Figures, transfers: int) -> None:
    for name in ("exponential", "equal"):
        kernel, rng, load = Kernel(), generator(1, 1), 0.6
        link = SharedLink(kernel, bytes_per_s=1e6, rtt_s=0.0)
        took = 0.0

        def done(started_s: float, kernel: Kernel = kernel) -> None:
            nonlocal took
            took += kernel.now_s - started_s

        starts = np.cumsum(rng.exponential(1 / load, transfers))
        sizes = rng.exponential(1e6, transfers) if name == "exponential" else np.full(transfers, 1e6)
        for start_s, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            kernel.at(start_s, lambda s, link=link, kernel=kernel, done=done: link.start(kernel.now_s, s, done), size)
        kernel.run()
        told = 1 / (1 - load)
        note(f"  shared link, {name} sizes: {took / transfers:.4f} s, processor sharing {told:.4f} s")
        figures.at_most(f"shared_link_{name}_mean_transfer_off", abs(took / transfers / told - 1), 0.02)


def large(figures: Figures, requests: int) -> None:
    scenario = read_scenario(LARGE, requests=requests)
    cpu, wall = time.process_time(), time.perf_counter()
    result = simulate(scenario)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    instances = scenario.fleet.near_decode + scenario.fleet.near_prefill + sum(scenario.fleet.far.values())
    note(
        f"  {requests:,} requests, {instances} instances, {result.events:,} events: {cpu:.1f} s CPU, {wall:.1f} s wall"
    )
    note(f"  {result.simulated_s / 3600:.0f} h of virtual time; finished {result.finished:,}, {result.fallbacks}")
    scaled = cpu * 1_000_000 / requests
    figures.at_most("one_million_requests_cpu_s", scaled, 120.0)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures.at_most("peak_memory_gib", gib, 2.0)
    accounted = result.finished + sum(result.refused.values()) + sum(result.failed.values())
    figures.between("requests_accounted_for", accounted / requests, 1, 1)


def queue(lengths: Lengths, servers: int, load: float, requests: int) -> Scenario:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in (("near.yaml", PROFILE), ("plan.yaml", PLAN), ("scenario.yaml", SCENARIO)):
            (folder / file).write_text(text)
        found = read_scenario(folder / "scenario.yaml", requests=requests)
    fleet = found.fleet.model_copy(update={"near_prefill": servers})
    return replace(found, input=lengths, fleet=fleet, rate_per_s=load * servers)


def exponential() -> Lengths:
    shares = (np.arange(1 << 16) + 0.5) / (1 << 16)
    values = -np.log1p(-shares)
    return observed([float(v) for v in values * MEAN_TOKENS / values.mean()])


if __name__ == "__main__":
    sys.exit(main())
