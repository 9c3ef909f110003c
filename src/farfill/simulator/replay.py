"""A replay held against its recording: mean time to first token, and throughput."""

from __future__ import annotations

import msgspec
import numpy as np

from farfill.core.errors import ConfigError
from farfill.simulator.world import World

DEFAULT_BOUND = 0.15


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that ended well when they were recorded. Throughput is over the time from the first arrival to
    the last end; `*_off` is simulated over measured, less 1. `same_placement`: the share placed as it was then."""

    requests: int
    measured_ttft_s: float
    simulated_ttft_s: float
    ttft_off: float
    measured_ttft_p90_s: float
    simulated_ttft_p90_s: float
    measured_requests_per_s: float
    simulated_requests_per_s: float
    throughput_off: float
    measured_tokens_per_s: float
    simulated_tokens_per_s: float
    same_placement: float
    bound: float
    within: bool


def held_against(world: World, bound: float = DEFAULT_BOUND) -> Replayed:
    """A world that has run a recording. Raises ConfigError when nothing can be compared."""
    kept, recorded = world.kept, world.scenario.recorded
    assert kept is not None, "only a recording can be held against"
    first_s = recorded[0].timestamp / 1000
    both = [
        (r, kept.ended[i])
        for i, r in enumerate(recorded)
        if r.outcome == "ok" and r.ttft_s is not None and i in kept.ended
    ]
    if not both:
        raise ConfigError("no request of the recording ended well both then and now, so nothing can be compared")
    measured = np.array([r.ttft_s for r, _ in both], dtype=np.float64)
    simulated = np.array([ttft_s for _, (ttft_s, _, _) in both], dtype=np.float64)
    took_s = max(r.timestamp / 1000 + r.duration_s for r, _ in both) - first_s
    takes_s = max(end_s for _, (_, end_s, _) in both)
    tokens = sum(r.output_length for r, _ in both)
    ttft_off = float(simulated.mean() / measured.mean() - 1)
    rate_off = took_s / takes_s - 1
    return Replayed(
        requests=len(both),
        measured_ttft_s=float(measured.mean()),
        simulated_ttft_s=float(simulated.mean()),
        ttft_off=ttft_off,
        measured_ttft_p90_s=float(np.quantile(measured, 0.9)),
        simulated_ttft_p90_s=float(np.quantile(simulated, 0.9)),
        measured_requests_per_s=len(both) / took_s,
        simulated_requests_per_s=len(both) / takes_s,
        throughput_off=rate_off,
        measured_tokens_per_s=tokens / took_s,
        simulated_tokens_per_s=tokens / takes_s,
        same_placement=sum((r.placement == "remote") == far for r, (_, _, far) in both) / len(both),
        bound=bound,
        within=abs(ttft_off) <= bound and abs(rate_off) <= bound,
    )
