"""Whether cross-site prefill pays, in words: what a buyer should do, and why."""

from __future__ import annotations

from collections.abc import Sequence

from farfill.planner.answer import LinkStudy, Option
from farfill.planner.problem import Problem
from farfill.planner.throughput import Split

_WORTH = 1.02
_DENSE_SHARE = 0.5


def judge(
    problem: Problem,
    chosen: Split,
    plan: Option,
    *,
    alternatives: Sequence[Option],
    study: LinkStudy | None,
    gain: float | None,
) -> tuple[bool, str]:
    """(whether it pays, why)."""
    if not problem.far:
        return False, "There is no far site, so nothing to decide: prefill and decode stay in one room."
    one_site = next((option for option in alternatives if option.name == "one site"), None)
    # With a demand both are bought to serve it, and prices differ; without, both cost the same, and capacities differ.
    price_gain = None if problem.workload.requests_per_s is None else _price_gain(plan, one_site)
    compared = price_gain if price_gain is not None else gain
    used = plan.far_share > 0 and any(part.instances for part in plan.far)
    if compared is None:
        return (
            used,
            "The near site cannot serve this alone at all, so far prefill is needed; compare with other hardware.",
        )
    if used and compared >= _WORTH:
        return True, (
            f"Cross-site prefill pays: {compared - 1:.0%} more for the money than one site. Prompts of more than"
            f" {plan.threshold_tokens} tokens ({plan.far_share:.0%} of requests) go far."
        )
    return False, f"Keep prefill in the room: {_reason(problem, chosen, study, used, compared)}"


def _reason(problem: Problem, chosen: Split, study: LinkStudy | None, used: bool, compared: float) -> str:
    share = _growing_share(problem)
    kind = ""
    if share is not None and share >= _DENSE_SHARE:
        kind = f" Your model is dense: {share:.0%} of its layers keep every token's keys and values."
    if study is not None and study.far_instance_gbit_per_s > 0:
        usable = sum(link.bytes_per_s for _, link in problem.far) * problem.link_utilisation * 8 / 1e9
        carried = usable / study.far_instance_gbit_per_s
        installed = sum(site.instances for site, _ in problem.far)
        if carried < installed:
            return (
                f"one far instance makes {study.far_instance_gbit_per_s:.1f} Gbit/s of KV, so the links carry"
                f" {carried:.1f} of {installed} instances.{kind} It needs"
                f" {study.knee_gbit_per_s:.0f} Gbit/s to serve all it could."
            )
    if not used:
        return f"the near instances serve this for less.{kind}"
    return f"far instances serve {abs(compared - 1):.0%} {'less' if compared < 1 else 'more'} for the money.{kind}"


def _price_gain(plan: Option, other: Option | None) -> float | None:
    """How many times cheaper a token is than in `other`, both at the planned rate."""
    if other is None or plan.price_per_million_tokens is None or other.price_per_million_tokens is None:
        return None
    return other.price_per_million_tokens / plan.price_per_million_tokens


def _growing_share(problem: Problem) -> float | None:
    """Share of layers that keep something of every token in full width (MLA's latents are not)."""
    geometry = problem.geometry
    if geometry is None:
        return None
    full = {t.layer for t in geometry.layout.tensors if t.kind == "full"}
    layers = {t.layer for t in geometry.layout.tensors}
    return len(full) / len(layers)
