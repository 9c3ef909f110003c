"""Answers a capacity question: what to run where, what it serves and costs, and whether cross-site prefill pays."""

from __future__ import annotations

from farfill.planner.answer import Answer, Option
from farfill.planner.causes import causes_of
from farfill.planner.curves import MonotoneCurve
from farfill.planner.link_study import equal_cost_gain, study_links
from farfill.planner.options import Running, describe
from farfill.planner.problem import Problem
from farfill.planner.solution import (
    PlanImpossibleError,
    Solution,
    advantage,
    demand_of,
    fleet_of,
    one_site,
    solve,
)
from farfill.planner.throughput import Fleet, homogeneous, naive
from farfill.planner.verdict import judge

__all__ = ["PlanImpossibleError", "demand_of", "fleet_of", "plan_capacity"]


def plan_capacity(problem: Problem) -> Answer:
    """The plan for `problem`. Raises PlanImpossibleError when an SLO or a demand is out of reach."""
    solution = solve(problem)
    running, rate = solution.running, solution.rate_per_s
    fleet, demand, chosen = running.fleet, running.demand, running.split
    alone = one_site(problem, solution)
    gained = advantage(problem, solution, alone)
    plan = describe("plan", problem, running, rate)
    study = study_links(problem, demand, fleet, chosen) if any(pool.instances for pool in fleet.far) else None
    causes = causes_of(problem) if problem.far and not gained.pays else None
    workload = problem.workload
    profiles = [problem.near.profile, *(site.profile for site, _ in problem.far)]
    return Answer(
        model=problem.name,
        workload=workload.source,
        sources={profile.name: profile.source for profile in profiles},
        mean_input_tokens=workload.input_tokens,
        mean_uncached_tokens=workload.lengths.mean,
        mean_output_tokens=workload.output_tokens,
        demand_per_s=workload.requests_per_s,
        rate_per_s=rate,
        arrival_scv=workload.arrival_scv,
        tpot_limit_s=problem.tpot_s,
        ttft_limit_s=problem.ttft_s,
        quantile=problem.quantile,
        headroom=problem.headroom,
        link_utilisation_limit=problem.link_utilisation,
        plan=plan,
        alternatives=_alternatives(problem, solution, alone),
        gain_at_equal_cost=equal_cost_gain(problem, demand, fleet, chosen),
        pays=gained.pays,
        verdict=judge(problem, plan, gained, causes),
        link=study,
        warnings=[*workload.warnings, *_warnings(problem)],
    )


def _alternatives(problem: Problem, solution: Solution, alone: Running | None) -> list[Option]:
    """One site for everything; all prefill far; and what the near site does alone."""
    fleet, demand, rate = solution.running.fleet, solution.running.demand, solution.rate_per_s
    near, found = problem.near.profile, list[Option]()
    if alone is not None:
        found.append(describe("one site", problem, alone, rate))
    if any(pool.instances for pool in fleet.far):
        found.append(describe("all prefill far", problem, Running(fleet, naive(fleet, demand), demand), rate))
        if fleet.near_instances >= 2:
            only = Fleet(near=near, near_instances=fleet.near_instances, far=())
            split = homogeneous(near, fleet.near_instances, demand)
            found.append(describe("near site without far", problem, Running(only, split, demand), rate))
    return found


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
