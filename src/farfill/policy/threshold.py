"""The threshold above which a far prefill pays, searched on the recent lengths. Pure.

Model and names: PrfaaS (arXiv 2604.15039), equations 3 to 6. Of the requests, the share p is longer than t:

    far prefill      theta_far    = min(N_far / T_far(l_long), egress / S_kv(l_long))
    near prefill     theta_near   = N_near / T_near(l_short)
    decode           theta_decode
    all requests     lambda(t)    = min(theta_far / p, theta_near / (1 - p), theta_decode)

with l_long and l_short the mean uncached lengths on either side of t. The best t is where lambda is largest; among
equals the one that leaves the most room on the tightest prefill side, then the largest (fewest bytes on the link).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Curve:
    """A piecewise linear function through (tokens, value) points in rising tokens; extended by its end slopes."""

    points: tuple[tuple[float, float], ...]

    def at(self, tokens: float) -> float:
        """The value at `tokens`, never below 0. One point: proportional to it."""
        points = self.points
        if len(points) == 1:
            return max(0.0, points[0][1] * tokens / points[0][0])
        index = min(max(bisect_right(points, (tokens, inf)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        return max(0.0, y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdInputs:
    """`lengths` are recent uncached prompt lengths in tokens. Instances are those in service now.

    `egress_bytes_per_s` is what the links may carry: their measured rate times the utilisation target. `decode_rate` is
    requests/s of the decode instances, None when it does not limit. `lowest` and `highest` bound the answer.
    """

    lengths: tuple[int, ...]
    far_instances: int
    near_instances: int
    far_prefill_s: Curve
    near_prefill_s: Curve
    kv_bytes: Curve
    egress_bytes_per_s: float
    decode_rate: float | None = None
    lowest: int = 0
    highest: int = 1 << 40
    current: int = 0
    gain: float = 0.02


@dataclass(frozen=True, slots=True)
class ThresholdResult:
    """`changed`: the new threshold serves at least `gain` more than the current one does; else it stays.

    Rates in requests/s at `threshold_tokens`; `egress_bytes_per_s` is what the far share sends at that rate.
    """

    threshold_tokens: int
    changed: bool
    rate: float
    rate_before: float
    far_share: float
    egress_bytes_per_s: float


def search_threshold(inputs: ThresholdInputs) -> ThresholdResult:
    """Try every length that occurred, and both bounds. O(n log n)."""
    lengths = sorted(inputs.lengths)
    current = min(max(inputs.current, inputs.lowest), inputs.highest)
    if not lengths:
        return ThresholdResult(current, current != inputs.current, 0.0, 0.0, 0.0, 0.0)
    sums = list(accumulate(lengths, initial=0))
    # A prompt goes far when it is at least t long, so just above each length is where the split changes.
    tried = {inputs.lowest, min(lengths[-1] + 1, inputs.highest), *(n + 1 for n in lengths)}
    best, best_key = current, _key(inputs, lengths, sums, current)
    for t in sorted(t for t in tried if inputs.lowest <= t <= inputs.highest):
        key = _key(inputs, lengths, sums, t)
        if key[0] > best_key[0] * (1 + EQUAL) or (key[0] >= best_key[0] * (1 - EQUAL) and key[1:] > best_key[1:]):
            best, best_key = t, key
    before = _rates(inputs, lengths, sums, current)[0]
    after, far_share, egress = _rates(inputs, lengths, sums, best)
    if best == current or after < before * (1 + inputs.gain):
        after, far_share, egress = _rates(inputs, lengths, sums, current)
        return ThresholdResult(current, current != inputs.current, after, before, far_share, egress)
    return ThresholdResult(best, best != inputs.current, after, before, far_share, egress)


def _key(inputs: ThresholdInputs, lengths: Sequence[int], sums: Sequence[int], t: int) -> tuple[float, float, int]:
    far, near, decode = _sides(inputs, lengths, sums, t)
    return min(far, near, decode), min(far, near), t


def _rates(inputs: ThresholdInputs, lengths: Sequence[int], sums: Sequence[int], t: int) -> tuple[float, float, float]:
    rate = min(_sides(inputs, lengths, sums, t))
    count, split = len(lengths), bisect_left(lengths, t)
    if split == count:
        return rate, 0.0, 0.0
    share = (count - split) / count
    long = (sums[-1] - sums[split]) / (count - split)
    return rate, share, rate * share * inputs.kv_bytes.at(long)


def _sides(inputs: ThresholdInputs, lengths: Sequence[int], sums: Sequence[int], t: int) -> tuple[float, float, float]:
    """Requests/s that far prefill, near prefill and decode could serve of the whole stream; inf: not limited by it."""
    count, split = len(lengths), bisect_left(lengths, t)
    far = near = inf
    if split < count:
        long = (sums[-1] - sums[split]) / (count - split)
        computed = _per_s(inputs.far_instances, inputs.far_prefill_s.at(long))
        sent = _per_s(inputs.egress_bytes_per_s, inputs.kv_bytes.at(long))
        far = min(computed, sent) * count / (count - split)
    if split > 0:
        short = sums[split] / split
        near = _per_s(inputs.near_instances, inputs.near_prefill_s.at(short)) * count / split
    return far, near, inf if inputs.decode_rate is None else inputs.decode_rate


def _per_s(amount: float, cost: float) -> float:
    if amount <= 0:
        return 0.0
    return amount / cost if cost > 0 else inf
