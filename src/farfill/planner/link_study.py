"""What the link decides: the knee below which the sites serve less, and where one site serves more for the money."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from farfill.planner.answer import LinkCase, LinkStudy
from farfill.planner.kv_size import kv_throughput_bits
from farfill.planner.options import hourly_price
from farfill.planner.problem import Problem
from farfill.planner.throughput import Demand, Fleet, Split, best_split, homogeneous

_FACTORS = tuple(2.0**power for power in range(1, -7, -1))
_KNEE_LOSS = 0.01
_LEAST, _MOST = 1e-4, 1e4


def study_links(problem: Problem, demand: Demand, fleet: Fleet, chosen: Split) -> LinkStudy:
    """The same instances with links faster and slower, threshold and split chosen anew each time.

    Rates told are of raw KV over whole links, of which `link_utilisation` is planned with. `fleet` has far instances.
    """
    total = sum(link.bytes_per_s for _, link in problem.far) * 8 / 1e9
    free = _capacity(fleet, demand, _MOST)

    def serves_all(factor: float) -> bool:
        return _capacity(fleet, demand, factor) >= free * (1 - _KNEE_LOSS)

    knee = 0.0 if serves_all(_LEAST) else _smallest(serves_all)
    money = one_site_for_the_same_money(problem, demand, fleet)
    even: float | None = None
    if money is not None and _capacity(fleet, demand, _LEAST) < money < free:
        even = _smallest(lambda factor: _capacity(fleet, demand, factor) >= money) * total
    busiest = max(fleet.far, key=lambda pool: pool.instances)
    seconds = busiest.profile.seconds_at(chosen.far_mean_tokens)
    cases: list[LinkCase] = []
    for factor in _FACTORS:
        split = best_split(_scaled(fleet, factor), demand)
        cases.append(
            LinkCase(
                factor=factor,
                gbit_per_s=total * factor,
                capacity_per_s=split.requests_per_s,
                threshold_tokens=max(0, round(split.threshold_tokens)),
                near_prefill=split.near_prefill,
                near_decode=split.near_decode,
                bound=split.bound,
            )
        )
    return LinkStudy(
        knee_gbit_per_s=knee * total,
        break_even_gbit_per_s=even,
        far_instance_gbit_per_s=kv_throughput_bits(demand.kv.bytes_at(chosen.far_mean_tokens), seconds) / 1e9,
        cases=cases,
        wire_share=sum(link.wire_bytes_per_s for _, link in problem.far) * 8 / 1e9 / total,
    )


def one_site_for_the_same_money(problem: Problem, demand: Demand, fleet: Fleet) -> float | None:
    """Requests per second of near instances only, as many as the fleet's price buys; None: less than two.

    Between whole numbers of instances it is interpolated, so that a price just short of one more does not decide.
    """
    count = hourly_price(problem, fleet) / problem.near.price
    low = math.floor(count + 1e-9)
    if low < 2:
        return None
    below, above = (homogeneous(problem.near.profile, n, demand).requests_per_s for n in (low, low + 1))
    return below + (above - below) * max(0.0, count - low)


def equal_cost_gain(problem: Problem, demand: Demand, fleet: Fleet, chosen: Split) -> float | None:
    """How many times more the fleet serves than one site for the same money; None: nothing to compare with."""
    money = one_site_for_the_same_money(problem, demand, fleet)
    return chosen.requests_per_s / money if money else None


def _scaled(fleet: Fleet, factor: float) -> Fleet:
    pools = tuple(replace(pool, link_bytes_per_s=pool.link_bytes_per_s * factor) for pool in fleet.far)
    return replace(fleet, far=pools)


def _capacity(fleet: Fleet, demand: Demand, factor: float) -> float:
    return best_split(_scaled(fleet, factor), demand).requests_per_s


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest factor for which `holds`, which is true from some factor on; within 0.2 %."""
    low, high = math.log(_LEAST), math.log(_MOST)
    while high - low > 0.002:
        middle = (low + high) / 2
        if holds(math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)
