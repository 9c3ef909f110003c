"""The simulator against closed forms, and how long a million requests take it.

    python benchmarks/simulator.py

Mean waits through all policies against closed forms: M/M/1, M/D/1 and M/G/1 (Pollaczek-Khinchine), M/M/4 (Erlang),
M/D/4 (Crommelin), M/G/4 (Kimura). Waits hang together, so a mean scatters: the exact recursion over the same requests
and over many more of their kind is its control variate (`farfill.testing.queues`). Transfers on a shared link are held
against processor sharing, which is the same for every distribution of sizes. The time of the large run is CPU time of
this process: what one core takes when nobody else wants it. The replay is of a run of two real sites on this machine,
recorded by its gateway, with KV going over a slow link.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from _common import Figures, note, note_machine
from farfill.cli.local_cluster import DECODE, LocalCluster, LocalPlan
from farfill.cli.local_ports import HOST, free_ports
from farfill.cli.local_ready import until_ready
from farfill.cli.model_store import find_source, model_folder
from farfill.planner.lengths import Lengths, observed, uniform
from farfill.simulator.fit import scenario_of_recording
from farfill.simulator.kernel import Kernel
from farfill.simulator.link import SharedLink
from farfill.simulator.run import simulate
from farfill.simulator.scenario import Scenario, read_scenario
from farfill.simulator.traffic import generator
from farfill.simulator.world import World
from farfill.testing.open_loop import OpenLoop, planned, send_all
from farfill.testing.queues import controlled, known_wait_s, poisson_queue
from farfill.testing.relay import Relay
from farfill.verify.client import gateway_client
from farfill.verify.prompts import load_corpus

ROOT = Path(__file__).parents[1]
LARGE = ROOT / "examples" / "simulation" / "two-sites-sessions.yaml"
MEAN_TOKENS = 10_000
S_PER_TOKEN = 1e-4
CHUNK_TOKENS = 256
LINK_BYTES_PER_S = 8e6
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
warmup: 0
"""


def main() -> int:
    """Measure and print; 1 when something falls short."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the large run")
    parser.add_argument("--queue-requests", type=int, default=30_000, help="of each queue, through the policies")
    parser.add_argument("--control-requests", type=int, default=4_000_000, help="of each queue's control variate")
    parser.add_argument("--transfers", type=int, default=300_000, help="over the shared link")
    parser.add_argument("--replay-requests", type=int, default=60, help="of the recorded run")
    parser.add_argument("--replay-rate", type=float, default=0.4, help="requests/s of it")
    parser.add_argument("--only", choices=["queues", "links", "large", "replay"], help="one part only")
    args = parser.parse_args()
    note_machine()
    figures = Figures()
    if args.only in (None, "queues"):
        queues(figures, args.queue_requests, args.control_requests)
    if args.only in (None, "links"):
        links(figures, args.transfers)
    if args.only in (None, "large"):
        large(figures, args.requests)
    if args.only in (None, "replay"):
        replay(figures, args.replay_requests, args.replay_rate)
    return figures.exit_code


def queues(figures: Figures, requests: int, control: int) -> None:
    for name, lengths, servers, load in (
        ("mm1_load_0.5", exponential(), 1, 0.5),
        ("mm1_load_0.7", exponential(), 1, 0.7),
        ("md1_load_0.7", observed([float(MEAN_TOKENS)]), 1, 0.7),
        ("mg1_uniform_load_0.7", uniform(1, 2 * MEAN_TOKENS), 1, 0.7),
        ("mm4_load_0.7", exponential(), 4, 0.7),
        ("md4_load_0.7", observed([float(MEAN_TOKENS)]), 4, 0.7),
        ("mg4_uniform_load_0.7", uniform(1, 2 * MEAN_TOKENS), 4, 0.7),
    ):
        scenario = queue(lengths, servers, load, requests)
        world = World(scenario)
        world.run()
        came = np.argsort(world.records.column("arrival"))
        arrivals, prompts, waits = (world.records.column(name)[came] for name in ("arrival", "prompt", "wait"))
        many = poisson_queue(lengths, S_PER_TOKEN, scenario.rate_per_s, control, seed=11)
        found = controlled(waits, (arrivals, (prompts - 1) * S_PER_TOKEN), many, servers)
        told = known_wait_s(lengths, S_PER_TOKEN, scenario.rate_per_s, servers)
        note(
            f"  {name}: {found.mean_s:.4f} s ± {found.error_s / told:.1%}, closed form {told:.4f} s;"
            f" the {requests:,} requests by themselves {float(waits.mean()):.4f} s"
        )
        figures.at_most(f"{name}_mean_wait_off", abs(found.mean_s / told - 1), 0.02)


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


def replay(figures: Figures, requests: int, rate_per_s: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        recording = Path(name) / "recording.jsonl"
        asyncio.run(record(recording, requests, rate_per_s))
        found = simulate(scenario_of_recording(recording)).replayed
    assert found is not None
    note(
        f"  {found.requests} requests: mean TTFT {found.measured_ttft_s:.2f} s, simulated {found.simulated_ttft_s:.2f};"
        f" P90 {found.measured_ttft_p90_s:.2f} and {found.simulated_ttft_p90_s:.2f} s;"
        f" {found.measured_requests_per_s:.3f} and {found.simulated_requests_per_s:.3f} requests/s,"
        f" {found.measured_tokens_per_s:.2f} and {found.simulated_tokens_per_s:.2f} tokens/s"
    )
    figures.at_most("replay_mean_ttft_off", abs(found.ttft_off), 0.15)
    figures.at_most("replay_throughput_off", abs(found.throughput_off), 0.15)
    figures.at_least("replay_placed_as_they_were", found.same_placement, 0.9)


async def record(recording: Path, requests: int, rate_per_s: float) -> None:
    """SmolLM2 at two sites with a thread each, and a relay as their link; what its gateway recorded."""
    source = find_source("smollm2")
    transfer_port, relay_port, port = free_ports(3)
    relayed = {"transfer_listen": f"{HOST}:{transfer_port}", "transfer_advertise": f"{HOST}:{relay_port}"}
    plan = LocalPlan(
        model_name=source.folder,
        model_dir=model_folder(source),
        port=port,
        threshold_tokens=512,
        chunk_tokens=CHUNK_TOKENS,
        timeout_ms=60_000,
        dtype="bfloat16",
        overrides={
            "engine": {"threads": 1},
            "kv_transfer": {"compression": "none"},
            "gateway": {"record_file": str(recording)},
            "workers": {DECODE: relayed},
        },
    )
    loop = OpenLoop(
        requests=requests,
        rate_per_s=rate_per_s,
        prompt_tokens=(100, 1200),
        output_tokens=(4, 40),
        shared_tokens=512,
        shared_share=0.3,
    )
    with Relay(f"{HOST}:{transfer_port}", listen=f"{HOST}:{relay_port}") as relay, LocalCluster(plan) as cluster:
        cluster.start()
        await until_ready(cluster, note)
        relay.set_rate(LINK_BYTES_PER_S)
        relay.delay_s = 0.01
        async with gateway_client(cluster.url) as client:
            await send_all(client, list(planned(loop, await load_corpus(client))))


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
