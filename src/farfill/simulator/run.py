"""Runs a scenario and sums up what came of it. The result is plain values: the same seed gives the same bytes."""

from __future__ import annotations

import gc

import msgspec
import numpy as np

from farfill.planner.curves import Floats
from farfill.simulator.replay import DEFAULT_BOUND, Replayed, held_against
from farfill.simulator.scenario import Scenario
from farfill.simulator.traffic import arrivals_text
from farfill.simulator.world import World

RESULT_VERSION = 1
_COLLECT_AFTER = 1_000_000


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """Over the whole run. `gbit_per_s` is raw KV carried, `wire_gbit_per_s` what that is when compressed."""

    site: str
    gbit_per_s: float
    wire_gbit_per_s: float
    utilisation: float
    most: float


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the slow loop."""

    at_s: float
    group: str
    before: int
    after: int
    reason: str
    converted: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Times are of requests that finished, without the first ones (`warmup`); counts are of all. `arrivals`: how they
    came, in words."""

    version: int = RESULT_VERSION
    scenario: str
    seed: int
    requests: int
    finished: int
    simulated_s: float
    events: int
    ttft: Spread
    tpot: Spread
    queue: Spread
    throughput_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    offload_share: float
    cached_tokens: int
    prompt_tokens: int
    placements: dict[str, int]
    fallbacks: dict[str, int]
    refused: dict[str, int]
    failed: dict[str, int]
    links: list[LinkUse]
    threshold_tokens: int
    threshold_searches: int
    scaling: list[Scaled]
    rollout: list[tuple[float, float, str]]
    at_s: list[float]
    series: dict[str, list[float]]
    ttft_s: list[float]
    replayed: Replayed | None = None
    arrivals: str = ""
    first_threshold_tokens: int = 0


def simulate(scenario: Scenario, *, bound: float = DEFAULT_BOUND) -> Result:
    """All of it, on virtual time. `bound` is how far a replay may be off its recording."""
    world = World(scenario)
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER)  # a run makes millions of values and no cycles
    try:
        world.run()
    finally:
        gc.set_threshold(*before)
    return summed_up(world, bound)


def summed_up(world: World, bound: float = DEFAULT_BOUND) -> Result:
    """The result of a world that has run."""
    records, scenario = world.records, world.scenario
    arrival, ttft, tpot, end = (records.column(name) for name in ("arrival", "ttft", "tpot", "end"))
    output, count = records.column("output"), len(arrival)
    span_s = max(1e-9, world.kernel.now_s - float(arrival[0])) if count else 1e-9
    problem = scenario.problem
    in_time = tpot <= problem.tpot_s * (1 + 1e-9)
    if problem.ttft_s is not None:
        in_time &= ttft <= problem.ttft_s
    # The tail in which nothing comes any more would make any rate look small: rates are of what ended until the last
    # request came.
    spread = count > 1 and arrival[-1] > arrival[0]
    busy_s = float(arrival[-1] - arrival[0]) if spread else span_s
    ended = (end >= arrival[0]) & (end <= arrival[-1]) if spread else np.ones(count, dtype=bool)
    return Result(
        scenario=scenario.name,
        seed=scenario.file.seed,
        requests=world.total,
        finished=world.total - sum(records.refused.values()) - sum(records.failed.values()),
        simulated_s=world.kernel.now_s,
        events=world.kernel.events,
        ttft=_spread(ttft),
        tpot=_spread(tpot[output > 1]),
        queue=_spread(records.column("wait")),
        throughput_per_s=float(ended.sum()) / busy_s,
        output_tokens_per_s=float(output[ended].sum()) / busy_s,
        goodput_per_s=float((ended & in_time).sum()) / busy_s,
        offload_share=float(np.mean(records.column("far"))) if count else 0.0,
        cached_tokens=int(records.column("cached").sum()),
        prompt_tokens=int(records.column("prompt").sum()),
        placements=_sorted(records.reasons),
        fallbacks=_sorted(records.fallbacks),
        refused=_sorted(records.refused),
        failed=_sorted(records.failed),
        links=_links(world),
        threshold_tokens=world.gateway.threshold_tokens,
        threshold_searches=world.gateway.searches,
        scaling=[
            Scaled(
                at_s=at_s,
                group=str(change.group),
                before=change.before,
                after=change.after,
                reason=str(change.reason),
                converted=change.converted,
            )
            for at_s, change in world.monitor.changes
        ],
        rollout=world.monitor.share_changes,
        at_s=world.monitor.samples.at_s,
        series=world.monitor.samples.series,
        ttft_s=[float(v) for v in np.quantile(ttft, np.linspace(0, 1, 201))] if count else [],
        replayed=held_against(world, bound) if scenario.recorded else None,
        arrivals=arrivals_text(scenario),
        first_threshold_tokens=scenario.threshold_tokens,
    )


def _links(world: World) -> list[LinkUse]:
    now_s, found = world.kernel.now_s, list[LinkUse]()
    links = {site.name: link for site, link in world.scenario.problem.far}
    for site in world.hardware.far:
        assert site.link is not None
        carried = site.link.carried_by_now()
        series = world.monitor.samples.series.get(f"link: {site.name}", [])
        gbit = carried * 8 / 1e9 / now_s if now_s > 0 else 0.0
        link = links[site.name]
        found.append(
            LinkUse(
                site=site.name,
                gbit_per_s=gbit,
                wire_gbit_per_s=gbit / link.compression,
                utilisation=carried / (link.bytes_per_s * now_s) if now_s > 0 else 0.0,
                most=max(series, default=0.0),
            )
        )
    return found


def _spread(values: Floats) -> Spread:
    if not len(values):
        return Spread(mean_s=0.0, p50_s=0.0, p90_s=0.0, p99_s=0.0)
    p50, p90, p99 = (float(v) for v in np.quantile(values, (0.5, 0.9, 0.99)))
    return Spread(mean_s=float(values.mean()), p50_s=p50, p90_s=p90, p99_s=p99)


def _sorted(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
