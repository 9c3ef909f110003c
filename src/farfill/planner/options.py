"""One way to run a fleet, with everything that is predicted of it: latency, goodput, cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from farfill.planner.answer import FarPart, Latency, Option
from farfill.planner.latency import DecodeLoad, FarPath, Traffic, Ttft, TtftModel, decode_load, ttft_model
from farfill.planner.problem import Problem
from farfill.planner.throughput import Demand, Fleet, Split

_SECONDS_PER_HOUR = 3600
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Running:
    """A fleet, how it is divided, and what is asked of it."""

    fleet: Fleet
    split: Split
    demand: Demand


def describe(name: str, problem: Problem, running: Running, rate_per_s: float) -> Option:
    """Everything about it at `rate_per_s`."""
    fleet, split = running.fleet, running.split
    workload = problem.workload
    load = _load(problem, running, rate_per_s)
    model = _model(problem, running, rate_per_s)
    # One rule for all: more than the capacity, which counts links up to what may be planned with, is overload.
    overloaded = load.utilisation > 1 + _ROUNDING or rate_per_s > split.requests_per_s * (1 + _ROUNDING)
    price = hourly_price(problem, fleet)
    hourly = rate_per_s * _SECONDS_PER_HOUR / 1e6
    return Option(
        name=name,
        near_prefill=split.near_prefill,
        near_decode=split.near_decode,
        far=_far_parts(problem, running, rate_per_s),
        threshold_tokens=max(0, round(split.threshold_tokens)) if fleet.far and split.far_share else None,
        far_share=split.far_share,
        far_mean_tokens=split.far_mean_tokens if split.far_share else 0.0,
        near_mean_tokens=split.near_mean_tokens if split.far_share < 1 else 0.0,
        far_per_s=split.far_per_s,
        near_prefill_per_s=split.near_prefill_per_s,
        decode_per_s=split.decode_per_s,
        capacity_per_s=split.requests_per_s,
        bound=split.bound,
        rate_per_s=rate_per_s,
        ttft_unloaded=_latency(model.summary(queued=False)),
        ttft_queued=_latency(_never() if overloaded else model.summary(queued=True)),
        tpot_s=None if overloaded else load.tpot_s,
        decode_batch=load.batch if math.isfinite(load.batch) else 0.0,
        goodput_per_s=_goodput(problem, model, rate_per_s, overloaded),
        most_goodput_per_s=_most_goodput(problem, running),
        price_per_hour=price,
        price_per_million_tokens=price / hourly / (workload.input_tokens + workload.output_tokens)
        if not overloaded
        else None,
        price_per_million_output_tokens=price / hourly / workload.output_tokens if not overloaded else None,
    )


def share_in_time(problem: Problem, running: Running, rate_per_s: float, *, queued: bool = True) -> float:
    """Share of requests that meet the TTFT limit at `rate_per_s`; 1 when there is none."""
    if problem.ttft_s is None:
        return 1.0
    return _model(problem, running, rate_per_s).within(problem.ttft_s, queued=queued)


def hourly_price(problem: Problem, fleet: Fleet) -> float:
    """Of all instances of a fleet."""
    prices = {site.name: site.price for site, _ in problem.far}
    return fleet.near_instances * problem.near.price + sum(prices[p.name] * p.instances for p in fleet.far)


def _far_parts(problem: Problem, running: Running, rate: float) -> list[FarPart]:
    split = running.split
    size = running.demand.size_bytes(running.demand.lengths.above(split.threshold_tokens))
    links = {site.name: link for site, link in problem.far}
    parts: list[FarPart] = []
    for pool, share in zip(running.fleet.far, _shares(running), strict=True):
        carried = rate * split.far_share * share * size
        parts.append(
            FarPart(
                site=pool.name,
                instances=pool.instances,
                share_of_far=share,
                gbit_per_s=carried * 8 / 1e9,
                wire_gbit_per_s=carried / links[pool.name].compression * 8 / 1e9,
                utilisation=carried / links[pool.name].bytes_per_s,
            )
        )
    return parts


def _shares(running: Running) -> list[float]:
    """Of far requests, by what each pool can take."""
    above = running.demand.lengths.above(running.split.threshold_tokens)
    capacities = [pool.capacity(running.demand, above) if above.share else 0.0 for pool in running.fleet.far]
    total = sum(capacities)
    return [capacity / total if total else 0.0 for capacity in capacities]


def _model(problem: Problem, running: Running, rate: float) -> TtftModel:
    split, workload = running.split, problem.workload
    traffic = Traffic(
        rate_per_s=rate,
        lengths=workload.lengths,
        kv=running.demand.kv,
        threshold_tokens=split.threshold_tokens,
        arrival_scv=workload.arrival_scv,
        chunk_tokens=problem.chunk_tokens,
    )
    links = {site.name: link for site, link in problem.far}
    paths = [
        FarPath(
            profile=pool.profile,
            instances=pool.instances,
            share_of_far=share,
            link_bytes_per_s=links[pool.name].bytes_per_s,
            rtt_s=links[pool.name].rtt_s,
        )
        for pool, share in zip(running.fleet.far, _shares(running), strict=True)
    ]
    return ttft_model(
        traffic,
        running.fleet.near,
        split.near_prefill,
        paths,
        _load(problem, running, rate).tpot_s,
        alone_step_s=running.fleet.near.step_s(1, workload.context_tokens),
    )


def _load(problem: Problem, running: Running, rate: float) -> DecodeLoad:
    return decode_load(
        running.fleet.near,
        rate,
        running.split.near_decode,
        output_tokens=problem.workload.output_tokens,
        context_tokens=problem.workload.context_tokens,
        max_batch=running.demand.decode.batch,
    )


def _goodput(problem: Problem, model: TtftModel, rate: float, overloaded: bool) -> float:
    if overloaded:
        return 0.0
    return rate if problem.ttft_s is None else rate * model.within(problem.ttft_s)


def _most_goodput(problem: Problem, running: Running) -> float:
    """The highest rate at which the wanted share of requests meets every limit."""
    limit = running.split.requests_per_s
    if problem.ttft_s is None:
        return limit
    low, high = 0.0, limit
    for _ in range(20):
        middle = (low + high) / 2
        if _model(problem, running, middle).within(problem.ttft_s) >= problem.quantile:
            low = middle
        else:
            high = middle
    return low


def _never() -> Ttft:
    return Ttft(mean_s=math.inf, p50_s=math.inf, p90_s=math.inf, p99_s=math.inf)


def _latency(ttft: Ttft) -> Latency:
    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return Latency(mean_s=known(ttft.mean_s), p50_s=known(ttft.p50_s), p90_s=known(ttft.p90_s), p99_s=known(ttft.p99_s))
