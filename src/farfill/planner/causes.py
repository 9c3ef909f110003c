"""Why cross-site prefill does not pay: each possible cause is tested by planning again without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from farfill.planner.problem import Problem
from farfill.planner.solution import PlanImpossibleError, advantage, one_site, solve

_UNLIMITED = 1e6
_NEXT_TO_NOTHING = 1e-6
_STEPS = 6
_SEARCHED = 64.0
"""Beyond so many times faster or cheaper nobody asks how much exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """What alone would make far prefill pay. Factors are of what there is; None: not by that alone.

    `link`: links at least so many times as fast. `price`: far instances at most at such a share of their price.
    `ttft`: no limit of TTFT. `together`: links without limit and free far instances, both at once.
    """

    link: float | None
    price: float | None
    ttft: bool
    together: bool


def causes_of(problem: Problem) -> Causes:
    """Of a problem where it does not pay. Plans about two dozen times."""
    link = _least_factor(lambda factor: _pays(_changed(problem, link=factor)), _UNLIMITED)
    cheaper = _least_factor(lambda factor: _pays(_changed(problem, price=1 / factor)), 1 / _NEXT_TO_NOTHING)
    ttft = problem.ttft_s is not None and _pays(replace(problem, ttft_s=None))
    alone = link is not None or cheaper is not None or ttft
    both = alone or _pays(_changed(problem, link=_UNLIMITED, price=_NEXT_TO_NOTHING))
    return Causes(link=link, price=None if cheaper is None else 1 / cheaper, ttft=ttft, together=both)


def _changed(problem: Problem, *, link: float = 1.0, price: float = 1.0) -> Problem:
    far = tuple(
        (replace(site, price=site.price * price), replace(way, bytes_per_s=way.bytes_per_s * link))
        for site, way in problem.far
    )
    return replace(problem, far=far)


def _pays(problem: Problem) -> bool:
    try:
        solution = solve(problem)
    except PlanImpossibleError:
        return False
    return advantage(problem, solution, one_site(problem, solution)).pays


def _least_factor(pays: Callable[[float], bool], most: float) -> float | None:
    """The smallest factor with which it pays, to some percent; `_SEARCHED` or more is told as `most`."""
    if not pays(most):
        return None
    if not pays(_SEARCHED):
        return most
    low, high = 0.0, math.log(_SEARCHED)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if pays(math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)
