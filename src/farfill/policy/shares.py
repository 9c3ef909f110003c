"""How a rate limit is divided among gateways. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FLOOR = 0.2


def rate_share(own_demand: float, other_demands: Sequence[float], floor: float = FLOOR) -> float:
    """This gateway's part (0..1) of a rate that `1 + len(other_demands)` gateways share.

    `floor` of it is divided evenly, so that nobody starts from nothing, the rest by demand. With the same demands known
    everywhere all parts together are 1.
    """
    gateways = 1 + len(other_demands)
    total = own_demand + sum(other_demands)
    if total <= 0:
        return 1 / gateways
    return floor / gateways + (1 - floor) * (own_demand / total)
