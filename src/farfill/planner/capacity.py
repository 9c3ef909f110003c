"""Answers a capacity question: what to run where, what it serves and costs, and whether cross-site prefill pays."""

from __future__ import annotations

from dataclasses import replace

from farfill.core.errors import ConfigError
from farfill.planner.answer import Answer, Option
from farfill.planner.curves import MonotoneCurve
from farfill.planner.link_study import equal_cost_gain, study_links
from farfill.planner.options import Running, describe, hourly_price, share_in_time
from farfill.planner.problem import Problem
from farfill.planner.profile import Profile
from farfill.planner.sizing import FarOffer, NearOffer, cheapest, whole
from farfill.planner.throughput import (
    DecodeRate,
    Demand,
    FarPool,
    Fleet,
    Split,
    best_split,
    best_threshold,
    homogeneous,
    naive,
)
from farfill.planner.verdict import judge

_MORE_EACH_TIME = 1.1


class PlanImpossibleError(ConfigError):
    """What is asked cannot be reached; the message names the key and what to do."""

    reason = "plan_impossible"


def plan_capacity(problem: Problem) -> Answer:
    """The plan for `problem`. Raises PlanImpossibleError when an SLO or a demand is out of reach."""
    demand = demand_of(problem)
    everything = fleet_of(problem)
    most = best_split(everything, demand)
    if most.requests_per_s <= 0:
        raise PlanImpossibleError(
            "sites: with these instances nothing can be served: the near site needs one to decode, and prefill needs"
            " instances near or far"
        )
    asked = problem.workload.requests_per_s
    if asked is None:
        running, rate = Running(everything, most, demand), most.requests_per_s / (1 + problem.headroom)
        _in_time(problem, running, rate, may_grow=False)
    else:
        running, rate = _sized(problem, demand, most, asked), asked
    fleet, chosen = running.fleet, running.split
    plan = describe("plan", problem, running, rate)
    alternatives = _alternatives(problem, demand, fleet, rate)
    study = study_links(problem, demand, fleet, chosen) if fleet.far else None
    gain = equal_cost_gain(problem, demand, fleet, chosen)
    pays, verdict = judge(problem, chosen, plan, alternatives=alternatives, study=study, gain=gain)
    workload = problem.workload
    profiles = [problem.near.profile, *(site.profile for site, _ in problem.far)]
    return Answer(
        model=problem.name,
        workload=workload.source,
        sources={profile.name: profile.source for profile in profiles},
        mean_input_tokens=workload.input_tokens,
        mean_uncached_tokens=workload.lengths.mean,
        mean_output_tokens=workload.output_tokens,
        demand_per_s=asked,
        rate_per_s=rate,
        tpot_limit_s=problem.tpot_s,
        ttft_limit_s=problem.ttft_s,
        quantile=problem.quantile,
        headroom=problem.headroom,
        link_utilisation_limit=problem.link_utilisation,
        plan=plan,
        alternatives=alternatives,
        gain_at_equal_cost=gain,
        pays=pays,
        verdict=verdict,
        link=study,
        warnings=_warnings(problem),
    )


def demand_of(problem: Problem) -> Demand:
    """What the equations need of a problem. Raises PlanImpossibleError when no batch meets the TPOT limit."""
    near, workload = problem.near.profile, problem.workload
    batch = near.best_batch(problem.tpot_s, workload.context_tokens)
    if batch < 1:
        alone = near.step_s(1, workload.context_tokens)
        raise PlanImpossibleError(
            f"slo.tpot_ms: {problem.tpot_s * 1000:g} ms cannot be reached: one sequence alone takes"
            f" {alone * 1000:.1f} ms a token at profile {near.name}; allow more, or decode on faster instances"
        )
    step = near.step_s(batch, workload.context_tokens)
    rate = DecodeRate(batch=batch, step_s=step, output_tokens=workload.output_tokens)
    return Demand(lengths=workload.lengths, kv=problem.kv, decode=rate, at_mean_length=problem.at_mean_length)


def fleet_of(problem: Problem) -> Fleet:
    """All instances there are, with links up to the share that may be planned with."""
    pools = [
        FarPool(
            name=site.name,
            profile=site.profile,
            instances=site.instances,
            link_bytes_per_s=link.bytes_per_s * problem.link_utilisation,
        )
        for site, link in problem.far
    ]
    return Fleet(near=problem.near.profile, near_instances=problem.near.instances, far=tuple(pools))


def _sized(problem: Problem, demand: Demand, most: Split, asked: float) -> Running:
    """The cheapest fleet with headroom, grown until it meets the TTFT limit too."""
    target = asked * (1 + problem.headroom)
    if most.requests_per_s < target * (1 - 1e-9):
        raise PlanImpossibleError(
            f"workload.requests_per_s: {asked:g} requests/s with {problem.headroom:.0%} headroom are {target:.2f},"
            f" but all sites together serve {most.requests_per_s:.2f}, bound by {most.bound};"
            " allow more instances or a faster link, or ask for less"
        )
    near = NearOffer(profile=problem.near.profile, instances=problem.near.instances, price=problem.near.price)
    everything = fleet_of(problem)
    far = [
        FarOffer(
            name=site.name,
            profile=site.profile,
            instances=site.instances,
            price=site.price,
            link_bytes_per_s=pool.link_bytes_per_s,
        )
        for (site, _), pool in zip(problem.far, everything.far, strict=True)
    ]
    while True:
        bought = cheapest(near, far, demand, min(target, most.requests_per_s * (1 - 1e-9)))
        if bought is None:
            # Whole instances: the best split of all of them is always there.
            fleet, chosen = everything, most
        else:
            pools = tuple(replace(p, instances=n) for p, n in zip(everything.far, bought.far, strict=True))
            fleet = Fleet(near=near.profile, near_instances=bought.near_prefill + bought.near_decode, far=pools)
            chosen = best_threshold(fleet, demand, bought.near_prefill)
        running = Running(fleet, chosen, demand)
        if _in_time(problem, running, asked, may_grow=bought is not None and target < most.requests_per_s):
            return running
        target *= _MORE_EACH_TIME


def _in_time(problem: Problem, running: Running, rate_per_s: float, *, may_grow: bool) -> bool:
    """Whether the TTFT limit is met; raises PlanImpossibleError when it is not and no more instances would help."""
    share = share_in_time(problem, running, rate_per_s)
    if share >= problem.quantile - 1e-9:
        return True
    if may_grow:
        return False
    idle = share_in_time(problem, running, rate_per_s, queued=False)
    raise PlanImpossibleError(
        f"slo.ttft_s: {problem.ttft_s:g} s for {problem.quantile:.0%} of requests cannot be reached: with all that may"
        f" run, {share:.0%} meet it at {rate_per_s:.2f} requests/s, and {idle:.0%} without any queue; allow more time"
        " or instances, shorten prompts, or prefill on faster instances"
    )


def _alternatives(problem: Problem, demand: Demand, fleet: Fleet, rate: float) -> list[Option]:
    """One site for everything; all prefill far; and what the near site does alone."""
    near, found = problem.near.profile, list[Option]()
    if problem.workload.requests_per_s is None:
        count = int(hourly_price(problem, fleet) / problem.near.price + 1e-6)
    else:
        target = rate * (1 + problem.headroom)
        enough = _enough_alone(demand, near, target)
        bought = cheapest(NearOffer(profile=near, instances=enough, price=problem.near.price), (), demand, target)
        count = 0 if bought is None else bought.near_prefill + bought.near_decode
    if count >= 2:
        alone = Fleet(near=near, near_instances=count, far=())
        split = homogeneous(near, count, demand)
        found.append(describe("one site", problem, Running(alone, split, demand), rate))
    if fleet.far and any(pool.instances for pool in fleet.far):
        split = naive(fleet, demand)
        found.append(describe("all prefill far", problem, Running(fleet, split, demand), rate))
        if fleet.near_instances >= 2:
            only = Fleet(near=near, near_instances=fleet.near_instances, far=())
            split = homogeneous(near, fleet.near_instances, demand)
            found.append(describe("near site without far", problem, Running(only, split, demand), rate))
    return found


def _enough_alone(demand: Demand, near: Profile, rate: float) -> int:
    """Instances that surely serve `rate` in one site."""
    prefill = rate * demand.seconds(near, demand.lengths.up_to(demand.lengths.most))
    return whole(prefill) + whole(rate / demand.decode.requests_per_s) + 1


def _warnings(problem: Problem) -> list[str]:
    found: list[str] = []
    longest = problem.workload.lengths.most
    for site in (problem.near, *(site for site, _ in problem.far)):
        curve = site.profile.prefill
        if isinstance(curve, MonotoneCurve) and longest > curve.last_tokens:
            found.append(
                f"profile {site.profile.name} ends at {curve.last_tokens:.0f} tokens, prompts at {longest:.0f}:"
                " times beyond are extrapolated and too short; measure longer ones"
            )
    return found
