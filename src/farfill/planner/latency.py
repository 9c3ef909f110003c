"""What users wait: time to first token with and without queues, its quantiles, and the time between tokens. Pure.

TTFT of a near prompt: wait for a near prefill instance, prefill, one decode step. Of a far one: a round trip for the
command and the first bytes, wait for a far instance, prefill, and what of the KV is not yet across when prefill ends,
one decode step. KV leaves while prefill runs, so that is what the link could not carry meanwhile, and at least the last
prefill chunk and the states. A link used to a share of rho gives each transfer 1 - rho of its rate (processor sharing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from farfill.planner.curves import Floats
from farfill.planner.kv_size import KVSize
from farfill.planner.lengths import Lengths
from farfill.planner.profile import Profile
from farfill.planner.queueing import FOR_EVER, Wait, moments, wait_in_pool

_MOST_POINTS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pool: the weight of each length, its seconds on idle sites and with the link shared, and the wait before."""

    weights: Floats
    idle_s: Floats
    shared_s: Floats
    wait: Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class FarPath:
    """One far site as latency sees it."""

    profile: Profile
    instances: int
    share_of_far: float
    link_bytes_per_s: float
    rtt_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What arrives, and where it is divided. `chunk_tokens` is what leaves at once when prefill ends."""

    rate_per_s: float
    lengths: Lengths
    kv: KVSize
    threshold_tokens: float
    arrival_scv: float
    chunk_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ttft:
    """Seconds until the first token; infinite where a pool is overloaded."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class TtftModel:
    """Time to first token of all requests together. The first decode step is that of the batch at the rate; `alone_s`
    that of a sequence alone, for times without queues."""

    def __init__(self, stages: list[Stage], decode_step_s: float, alone_s: float) -> None:
        self._stages = [stage for stage in stages if stage.weights.sum() > 0]
        self._step_s = decode_step_s
        self._alone_s = alone_s

    def within(self, seconds: float, *, queued: bool = True) -> float:
        """Share of requests whose first token comes within `seconds`."""
        share = 0.0
        for stage in self._stages:
            left = seconds - self._first_step_s(queued) - (stage.shared_s if queued else stage.idle_s)
            reached = stage.wait.within(left) if queued else (left >= 0).astype(np.float64)
            share += float((stage.weights * reached).sum())
        return share

    def mean_s(self, *, queued: bool = True) -> float:
        """Mean over all requests."""
        total = self._first_step_s(queued)
        for stage in self._stages:
            total += float((stage.weights * (stage.shared_s if queued else stage.idle_s)).sum())
            if queued:
                total += float(stage.weights.sum()) * stage.wait.overall_s
        return total

    def quantile_s(self, share: float, *, queued: bool = True) -> float:
        """Seconds that `share` of the requests do not exceed."""
        high = 1.0
        while self.within(high, queued=queued) < share:
            high *= 2
            if high > 1e7:
                return math.inf
        low = 0.0
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            if self.within(middle, queued=queued) >= share:
                high = middle
            else:
                low = middle
        return high

    def summary(self, *, queued: bool) -> Ttft:
        """Mean and quantiles."""
        p50, p90, p99 = (self.quantile_s(share, queued=queued) for share in (0.5, 0.9, 0.99))
        return Ttft(mean_s=self.mean_s(queued=queued), p50_s=p50, p90_s=p90, p99_s=p99)

    def _first_step_s(self, queued: bool) -> float:
        return self._step_s if queued else self._alone_s


def ttft_model(
    traffic: Traffic,
    near: Profile,
    near_prefill: int,
    far: list[FarPath],
    decode_step_s: float,
    *,
    alone_step_s: float | None = None,
) -> TtftModel:
    """The model of a fleet that runs with this threshold. `alone_step_s`: unset, steps take equally long alone."""
    below, above = traffic.lengths.split(traffic.threshold_tokens)
    stages: list[Stage] = []
    if below[1].sum() > 0:
        tokens, weights = _thinned(*below)
        seconds = near.prefill_s(tokens)
        wait = _wait(traffic, weights, near.service_s(tokens), near_prefill, share=1.0)
        stages.append(Stage(weights=weights, idle_s=seconds, shared_s=seconds, wait=wait))
    if above[1].sum() > 0:
        tokens, weights = _thinned(*above)
        sizes = np.array([traffic.kv.bytes_at(float(t)) for t in tokens])
        last = np.array([traffic.kv.bytes_at(min(float(t), traffic.chunk_tokens)) for t in tokens])
        stages += [
            _far_stage(traffic, path, tokens, weights, sizes=sizes, last=last) for path in far if path.share_of_far > 0
        ]
    return TtftModel(stages, decode_step_s, decode_step_s if alone_step_s is None else alone_step_s)


def _far_stage(
    traffic: Traffic, path: FarPath, tokens: Floats, weights: Floats, *, sizes: Floats, last: Floats
) -> Stage:
    """`sizes` are bytes of KV, `last` those that cannot leave before prefill ends."""
    prefill = path.profile.prefill_s(tokens)
    offered = traffic.rate_per_s * path.share_of_far * float((weights * sizes).sum())
    free = path.link_bytes_per_s - offered

    def seconds(rate: float) -> Floats:
        return path.rtt_s + np.maximum(sizes / rate, prefill + last / rate)

    idle = seconds(path.link_bytes_per_s)
    wait = _wait(traffic, weights, path.profile.service_s(tokens), path.instances, share=path.share_of_far)
    if free <= 0:
        wait = FOR_EVER
    return Stage(
        weights=weights * path.share_of_far, idle_s=idle, shared_s=seconds(free) if free > 0 else idle, wait=wait
    )


def _wait(traffic: Traffic, weights: Floats, service: Floats, servers: int, *, share: float) -> Wait:
    mean, scv = moments(service, weights)
    part = float(weights.sum()) * share
    # Which pool a request goes to does not depend on when it comes: what is left of a stream by chance is nearer to a
    # Poisson one, whether the whole is more even or comes in bursts.
    arrival_scv = 1 + part * (traffic.arrival_scv - 1)
    return wait_in_pool(traffic.rate_per_s * part, servers, mean, scv, arrival_scv=arrival_scv)


def _thinned(tokens: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """At most `_MOST_POINTS` points with the same total weight: neighbours are merged."""
    if len(tokens) <= _MOST_POINTS:
        return tokens, weights
    starts = np.linspace(0, len(tokens), _MOST_POINTS, endpoint=False).astype(int)
    total = np.add.reduceat(weights, starts)
    return np.add.reduceat(tokens * weights, starts) / np.maximum(total, 1e-300), total


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """Decode instances under a load: sequences running on each, and the time between tokens."""

    batch: float
    tpot_s: float
    utilisation: float


def decode_load(
    profile: Profile, rate_per_s: float, instances: int, *, output_tokens: float, context_tokens: float, max_batch: int
) -> DecodeLoad:
    """By Little's law the batch is rate × output × step, and the step grows with the batch: their meeting point.

    At more than `max_batch` the rest waits: the step stays that of `max_batch`, and utilisation exceeds 1.
    """
    if instances < 1:
        return DecodeLoad(batch=math.inf, tpot_s=math.inf, utilisation=math.inf)
    each = rate_per_s / instances
    capacity = max_batch / (profile.step_s(max_batch, context_tokens) * output_tokens)
    batch = 1.0
    for _ in range(200):
        wanted = each * output_tokens * profile.step_s(max(1.0, batch), context_tokens)
        following = min(float(max_batch), max(wanted, 1e-6))
        if abs(following - batch) < 1e-6 * max(1.0, batch):
            break
        batch = (batch + following) / 2
    step = profile.step_s(max(1.0, batch), context_tokens)
    return DecodeLoad(batch=batch, tpot_s=step, utilisation=each / capacity)
