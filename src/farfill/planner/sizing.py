"""The cheapest set of instances that serves a demand, by trying every number of near prefill instances. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farfill.planner.profile import Profile
from farfill.planner.throughput import Demand


@dataclass(frozen=True, slots=True, kw_only=True)
class FarOffer:
    """What a far site offers: at most `instances` at `price`, over a link of so many usable bytes per second."""

    name: str
    profile: Profile
    instances: int
    price: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NearOffer:
    """What the near site offers."""

    profile: Profile
    instances: int
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """Instances to run, `far` in the order of the offers, and their price per hour."""

    near_prefill: int
    near_decode: int
    far: tuple[int, ...]
    threshold_tokens: float
    price: float


def cheapest(near: NearOffer, far: Sequence[FarOffer], demand: Demand, rate_per_s: float) -> Purchase | None:
    """The cheapest purchase that serves `rate_per_s`; of equal ones that with the least traffic. None: none does."""
    decode = whole(rate_per_s / demand.decode.requests_per_s)
    best: tuple[float, float, Purchase] | None = None
    for prefill in range(near.instances - decode + 1):
        found = _with_near(near, far, demand, rate_per_s, prefill=prefill, decode=decode)
        if found is None:
            continue
        traffic, purchase = found
        if best is None or (purchase.price, traffic) < best[:2]:
            best = (purchase.price, traffic, purchase)
        if not traffic:  # more near instances only cost more
            break
    return None if best is None else best[2]


def whole(instances: float) -> int:
    """Instances to run when so many are needed on average."""
    return max(0, math.ceil(instances - 1e-9))


def _with_near(
    near: NearOffer, far: Sequence[FarOffer], demand: Demand, rate: float, *, prefill: int, decode: int
) -> tuple[float, Purchase] | None:
    threshold = _highest_threshold(near, demand, rate, prefill)
    above = demand.lengths.above(threshold)
    counts, traffic = [0] * len(far), 0.0
    if above.share:
        size = demand.size_bytes(above)
        left = rate * above.share
        traffic = left * size
        seconds = [demand.seconds(offer.profile, above) for offer in far]
        for i in sorted(range(len(far)), key=lambda i: far[i].price * seconds[i]):
            taken = min(left, far[i].instances / seconds[i], far[i].link_bytes_per_s / size)
            counts[i] = whole(taken * seconds[i])
            left -= taken
        if left > 1e-9 * rate:
            return None
    price = (prefill + decode) * near.price + sum(n * offer.price for n, offer in zip(counts, far, strict=True))
    purchase = Purchase(
        near_prefill=prefill, near_decode=decode, far=tuple(counts), threshold_tokens=threshold, price=price
    )
    return traffic, purchase


def _highest_threshold(near: NearOffer, demand: Demand, rate: float, prefill: int) -> float:
    """The longest prompts that so many near instances can still take."""
    low, high = demand.lengths.least - 1, demand.lengths.most
    if not prefill:
        return low

    def needed(threshold: float) -> float:
        below = demand.lengths.up_to(threshold)
        return rate * below.share * demand.seconds(near.profile, below) if below.share else 0.0

    if needed(high) <= prefill:
        return high
    while high - low > 0.5:
        middle = (low + high) / 2
        if needed(middle) <= prefill:
            low = middle
        else:
            high = middle
    return low
