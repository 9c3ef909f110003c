"""Whether cross-site prefill pays, in words: what a buyer should do, and why."""

from __future__ import annotations

from farfill.planner.answer import Option
from farfill.planner.causes import Causes
from farfill.planner.kv_size import kv_throughput_bits
from farfill.planner.problem import Problem
from farfill.planner.solution import Advantage

_DENSE_SHARE = 0.5
_FAR_FETCHED = 60.0


def judge(problem: Problem, plan: Option, gained: Advantage, causes: Causes | None) -> str:
    """In words. `causes` is given where there are far sites and it does not pay."""
    if not problem.far:
        return "There is no far site, so nothing to decide: prefill and decode stay in one room."
    if causes is None:
        return _pays(problem, plan, gained)
    return (
        f"Keep prefill in the room: {_compared(problem, gained)}. {_why(problem, plan, causes)}{_kind(problem, causes)}"
    )


def _pays(problem: Problem, plan: Option, gained: Advantage) -> str:
    where = (
        f"Prompts of more than {plan.threshold_tokens:,} tokens ({plan.far_share:.0%} of requests) go far."
        if plan.threshold_tokens
        else "All prompts go far."
    )
    if gained.gain is None:
        why = (
            "near instances alone miss slo.ttft_s, whatever their number"
            if problem.workload.requests_per_s is not None
            else "its money buys fewer than two near instances, and less than two serve nothing"
        )
        return f"Cross-site prefill is needed: {why}; compare with other hardware. {where}"
    return f"Cross-site prefill pays: {gained.gain - 1:.0%} more for the money than one site. {where}"


def _compared(problem: Problem, gained: Advantage) -> str:
    if not gained.used or gained.gain is None:
        demand = problem.workload.requests_per_s
        return "in the best split nothing goes far" if demand is None else "near instances alone serve this for less"
    percent = round((gained.gain - 1) * 100)
    more = "as much as" if percent == 0 else f"{abs(percent)}% {'more' if percent > 0 else 'less'} than"
    site, count = problem.near, gained.one_site_instances
    there = f"; {site.name} has {site.instances} now" if count > site.instances else ""
    return f"with far instances the same money serves {more} one site of {count} instances{there}"


def _why(problem: Problem, plan: Option, causes: Causes) -> str:
    found: list[str] = []
    if causes.link is not None:
        found.append(_link(problem, plan, causes.link))
    if causes.price is not None:
        found.append(_price(problem, causes.price))
    if causes.ttft:
        found.append("without slo.ttft_s")
    if found:
        return f"It would pay {', or '.join(found)}."
    if causes.together:
        return "Neither a faster link nor cheaper far instances alone would change that, both together would."
    return "Not even free far instances over links without limit would change that: prefill is not what limits here."


def _link(problem: Problem, plan: Option, factor: float) -> str:
    wire = sum(link.wire_bytes_per_s for _, link in problem.far) * 8 / 1e9
    site, _ = max(problem.far, key=lambda pair: pair[0].instances)
    tokens = plan.far_mean_tokens or problem.workload.lengths.mean
    made = kv_throughput_bits(problem.kv.bytes_at(tokens), site.profile.seconds_at(tokens)) / 1e9
    wanted = f"with links of {wire * factor:.0f} Gbit/s" if factor < _FAR_FETCHED else "with links without limit"
    return f"{wanted} instead of {wire:g} (a busy instance at {site.name} makes {made:.1f} Gbit/s of raw KV)"


def _price(problem: Problem, share: float) -> str:
    if share < 1 / _FAR_FETCHED:
        return "if far instances cost next to nothing"
    if len(problem.far) == 1:
        site = problem.far[0][0]
        return f"if an instance at {site.name} cost at most {site.price * share:.3g} an hour instead of {site.price:g}"
    return f"if far instances cost at most {share:.0%} of what they do"


def _kind(problem: Problem, causes: Causes) -> str:
    """That the model is dense, where that is what makes the link too small."""
    share = _growing_share(problem)
    if causes.link is None or share is None or share < _DENSE_SHARE:
        return ""
    return f" Your model is dense: {share:.0%} of its layers keep every token's keys and values."


def _growing_share(problem: Problem) -> float | None:
    """Share of layers that keep something of every token in full width (MLA's latents are not)."""
    geometry = problem.geometry
    if geometry is None:
        return None
    full = {t.layer for t in geometry.layout.tensors if t.kind == "full"}
    layers = {t.layer for t in geometry.layout.tensors}
    return len(full) / len(layers)
