"""What to run for a problem: the fleet that serves what is asked, in time; and one site under the same rules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from farfill.core.errors import ConfigError
from farfill.planner.link_study import equal_cost_gain
from farfill.planner.options import Running, hourly_price, share_in_time
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
)

WORTH = 1.02
"""Far prefill pays from so many times as much for the money on."""
_MORE_EACH_TIME = 1.1
_MOST_TIMES = 48
_ROUNDING = 1e-9


class PlanImpossibleError(ConfigError):
    """What is asked cannot be reached; the message names the key and what to do."""

    reason = "plan_impossible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What runs, at which rate."""

    running: Running
    rate_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """Of far prefill over one site of so many instances: `gain` times as much for the money; None: one site cannot do
    it at all."""

    used: bool
    gain: float | None
    one_site_instances: int = 0

    @property
    def pays(self) -> bool:
        """Whether something goes far, and that is worth while."""
        return self.used and (self.gain is None or self.gain >= WORTH)


def solve(problem: Problem) -> Solution:
    """The cheapest that serves the demand; without one, all instances. Raises PlanImpossibleError."""
    demand = demand_of(problem)
    everything = fleet_of(problem)
    most = best_split(everything, demand)
    if most.requests_per_s <= 0:
        raise PlanImpossibleError(
            "sites: with these instances nothing can be served: the near site needs one to decode, and prefill needs"
            " instances near or far"
        )
    asked = problem.workload.requests_per_s
    if asked is not None:
        return Solution(running=_sized(problem, demand, most, asked), rate_per_s=asked)
    running, rate = Running(everything, most, demand), most.requests_per_s / (1 + problem.headroom)
    _in_time(problem, running, rate, may_grow=False)
    return Solution(running=running, rate_per_s=rate)


def one_site(problem: Problem, solution: Solution) -> Running | None:
    """Near instances only: as many as the same money buys, or, with a demand, as serve it with the same headroom and
    TTFT limit, if any number does. None: the money buys less than two."""
    near, demand = problem.near.profile, solution.running.demand
    if problem.workload.requests_per_s is None:
        return _alone(near, int(hourly_price(problem, solution.running.fleet) / problem.near.price + 1e-6), demand)
    first: Running | None = None
    target = solution.rate_per_s * (1 + problem.headroom)
    for _ in range(_MOST_TIMES):
        offer = NearOffer(profile=near, instances=_enough_alone(demand, near, target), price=problem.near.price)
        bought = cheapest(offer, (), demand, target)
        found = None if bought is None else _alone(near, bought.near_prefill + bought.near_decode, demand)
        if found is None:
            break
        first = first or found
        if _meets_limit(problem, found, solution.rate_per_s):
            return found
        if share_in_time(problem, found, solution.rate_per_s, queued=False) < problem.quantile - _ROUNDING:
            break  # too slow even without a queue
        target *= _MORE_EACH_TIME
    return first


def advantage(problem: Problem, solution: Solution, alone: Running | None) -> Advantage:
    """`alone` is what `one_site` found. Prices are compared where a demand is served, else capacities for the same
    money."""
    running = solution.running
    used = running.split.far_share > 0 and any(pool.instances for pool in running.fleet.far)
    if problem.workload.requests_per_s is None:
        gain = equal_cost_gain(problem, running.demand, running.fleet, running.split)
        return Advantage(used=used, gain=gain, one_site_instances=alone.fleet.near_instances if alone else 0)
    if alone is None or not _meets_limit(problem, alone, solution.rate_per_s):
        return Advantage(used=used, gain=None)
    gain = hourly_price(problem, alone.fleet) / hourly_price(problem, running.fleet)
    return Advantage(used=used, gain=gain, one_site_instances=alone.fleet.near_instances)


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
    """The cheapest fleet with headroom that meets the TTFT limit: with far instances, or, where those are too late or
    need too many more, without."""
    target = asked * (1 + problem.headroom)
    if most.requests_per_s < target * (1 - _ROUNDING):
        raise PlanImpossibleError(
            f"workload.requests_per_s: {asked:g} requests/s with {problem.headroom:.0%} headroom are {target:.2f},"
            f" but all sites together serve {most.requests_per_s:.2f}, bound by {most.bound};"
            " allow more instances or a faster link, or ask for less"
        )
    everything = fleet_of(problem)
    try:
        found = _grown(problem, demand, everything, most, asked)
    except PlanImpossibleError:
        near = _near_only(problem, demand, everything, asked)
        if near is None:
            raise
        return near
    if problem.ttft_s is None or not any(pool.instances for pool in found.fleet.far):
        return found
    near = _near_only(problem, demand, everything, asked)
    if near is None or hourly_price(problem, near.fleet) >= hourly_price(problem, found.fleet):
        return found
    return near


def _near_only(problem: Problem, demand: Demand, everything: Fleet, asked: float) -> Running | None:
    """Without far instances; None: those that the near site has do not serve it in time."""
    idle = replace(everything, far=tuple(replace(pool, instances=0) for pool in everything.far))
    most = best_split(replace(everything, far=()), demand)
    if most.requests_per_s < asked * (1 + problem.headroom) * (1 - _ROUNDING):
        return None
    try:
        found = _grown(replace(problem, far=()), demand, replace(idle, far=()), most, asked)
    except PlanImpossibleError:
        return None
    return replace(found, fleet=replace(found.fleet, far=idle.far))


def _grown(problem: Problem, demand: Demand, everything: Fleet, most: Split, asked: float) -> Running:
    """The cheapest fleet, grown until it meets the TTFT limit; `most` is the best split of all instances."""
    target = asked * (1 + problem.headroom)
    near = NearOffer(profile=problem.near.profile, instances=problem.near.instances, price=problem.near.price)
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


def _meets_limit(problem: Problem, running: Running, rate_per_s: float) -> bool:
    return share_in_time(problem, running, rate_per_s) >= problem.quantile - _ROUNDING


def _alone(near: Profile, instances: int, demand: Demand) -> Running | None:
    if instances < 2:
        return None
    fleet = Fleet(near=near, near_instances=instances, far=())
    return Running(fleet, homogeneous(near, instances, demand), demand)


def _enough_alone(demand: Demand, near: Profile, rate: float) -> int:
    """Instances that surely serve `rate` in one site."""
    prefill = rate * demand.seconds(near, demand.lengths.up_to(demand.lengths.most))
    return whole(prefill) + whole(rate / demand.decode.requests_per_s) + 1
