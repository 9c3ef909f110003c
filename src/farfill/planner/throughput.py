"""How much a fleet of sites serves: equations 1 to 8 of arXiv 2604.15039, for any number of far sites. Pure.

One near site has the users; it decodes, and prefills prompts up to the threshold. Far sites prefill the longer ones and
send their KV over their links. The paper takes the prefill time of the mean length on each side of the threshold; with
attention's square the mean of the times is more, so that is the default here, and the paper's way an option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farfill.planner.curves import Floats
from farfill.planner.kv_size import KVSize
from farfill.planner.lengths import Lengths, Part
from farfill.planner.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class FarPool:
    """Prefill instances of one far site, and the bytes per second its link to the near site may carry."""

    name: str
    profile: Profile
    instances: int
    link_bytes_per_s: float

    def capacity(self, demand: Demand, part: Part) -> float:
        """Requests of `part` per second: instances or link, whichever is less (eq. 3)."""
        return min(self.compute_capacity(demand, part), self.link_bytes_per_s / demand.size_bytes(part))

    def compute_capacity(self, demand: Demand, part: Part) -> float:
        """Requests of `part` per second that the instances can prefill."""
        return self.instances / demand.seconds(self.profile, part) if self.instances else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRate:
    """What one decode instance does under the SLO: `batch` sequences, one token of each every `step_s`."""

    batch: int
    step_s: float
    output_tokens: float

    @property
    def requests_per_s(self) -> float:
        """Of one instance (eq. 5)."""
        return self.batch / (self.step_s * self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to run the fleet, and what bounds it. Rates of stages are of that stage alone."""

    threshold_tokens: float
    near_prefill: int
    near_decode: int
    far_instances: int
    far_share: float
    far_mean_tokens: float
    near_mean_tokens: float
    far_per_s: float
    near_prefill_per_s: float
    decode_per_s: float
    requests_per_s: float
    link_bytes_per_s: float
    bound: str

    @property
    def bytes_per_request(self) -> float:
        """KV bytes over all links per request of any length."""
        return self.link_bytes_per_s / self.requests_per_s if self.requests_per_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What there is: `near_instances` of one kind, to be divided between prefill and decode, and far pools."""

    near: Profile
    near_instances: int
    far: tuple[FarPool, ...]


class Demand:
    """What is asked: lengths to prefill, KV size by length, and a decode instance's rate under the SLO.

    `at_mean_length`: prefill times and sizes are those of the mean length (the paper), not the means of all of them.
    """

    def __init__(self, *, lengths: Lengths, kv: KVSize, decode: DecodeRate, at_mean_length: bool = False) -> None:
        self.lengths = lengths
        self.kv = kv
        self.decode = decode
        self._at_mean_length = at_mean_length
        self._sums: dict[int, tuple[object, Floats]] = {}

    def seconds(self, profile: Profile, part: Part) -> float:
        """Instance seconds of one prompt of `part`, on average."""
        if self._at_mean_length or not part.share:
            return float(profile.service_s(part.mean_tokens))
        return self._mean(profile, part, profile.service_s)

    def size_bytes(self, part: Part) -> float:
        """KV bytes of one prompt of `part`, on average; at least 1."""
        if self._at_mean_length or not part.share:
            return max(1.0, self.kv.bytes_at(part.mean_tokens))
        return max(1.0, self._mean(self.kv, part, self._sizes))

    def _sizes(self, tokens: Floats) -> Floats:
        return np.array([self.kv.bytes_at(float(t)) for t in tokens])

    def _mean(self, key: object, part: Part, value: Callable[[Floats], Floats]) -> float:
        """Mean of `value` over a part, from running sums that are kept for each `key`."""
        kept = self._sums.get(id(key))
        if kept is None:
            sums = np.concatenate(([0.0], np.cumsum(value(self.lengths.tokens) * self.lengths.weights)))
            self._sums[id(key)] = kept = (key, sums)  # the key is held, so that its id stays its own
        sums = kept[1]
        return float(sums[part.end] - sums[part.start]) / part.share


def evaluate(fleet: Fleet, demand: Demand, threshold: float, near_prefill: int) -> Split:
    """The fleet with this threshold and this many near prefill instances (eqs. 3 to 6)."""
    above, below = demand.lengths.above(threshold), demand.lengths.up_to(threshold)
    far = sum(pool.capacity(demand, above) for pool in fleet.far) if above.share else 0.0
    near = near_prefill / demand.seconds(fleet.near, below) if below.share and near_prefill else 0.0
    decode = (fleet.near_instances - near_prefill) * demand.decode.requests_per_s
    stages = {"decode": decode}
    if above.share:
        link_bound = any(p.capacity(demand, above) < p.compute_capacity(demand, above) for p in fleet.far)
        stages["link" if link_bound else "far prefill"] = far / above.share
    if below.share:
        stages["near prefill"] = near / below.share
    bound = min(stages, key=lambda stage: stages[stage])
    rate = stages[bound]
    return Split(
        threshold_tokens=threshold,
        near_prefill=near_prefill,
        near_decode=fleet.near_instances - near_prefill,
        far_instances=sum(pool.instances for pool in fleet.far),
        far_share=above.share,
        far_mean_tokens=above.mean_tokens,
        near_mean_tokens=below.mean_tokens,
        far_per_s=far,
        near_prefill_per_s=near,
        decode_per_s=decode,
        requests_per_s=rate,
        link_bytes_per_s=rate * above.share * demand.size_bytes(above) if above.share else 0.0,
        bound=bound,
    )


def best_threshold(fleet: Fleet, demand: Demand, near_prefill: int) -> Split:
    """The split with the threshold that serves most; of equal ones that which uses the link least.

    Raising it takes work from far and gives it to near: what far can serve of the whole rises, what near can falls,
    so the best is where both meet (eq. 7), or, where decode serves less than that, as high as near prefill allows.
    """
    low, high = demand.lengths.least - 1, demand.lengths.most
    if not near_prefill:
        return evaluate(fleet, demand, low, 0)
    decode = (fleet.near_instances - near_prefill) * demand.decode.requests_per_s

    def near_suffices(split: Split) -> bool:
        if split.far_share >= 1 - 1e-12:
            return True
        near = split.near_prefill_per_s / (1 - split.far_share)
        far = split.far_per_s / split.far_share if split.far_share else float("inf")
        return near >= min(far, decode)

    if near_suffices(whole := evaluate(fleet, demand, high, near_prefill)):
        return whole
    for _ in range(60):
        middle = (low + high) / 2
        if near_suffices(evaluate(fleet, demand, middle, near_prefill)):
            low = middle
        else:
            high = middle
        if high - low < 0.5:
            break
    at_low, at_high = (evaluate(fleet, demand, t, near_prefill) for t in (low, high))
    return max(at_low, at_high, key=lambda split: (split.requests_per_s, split.threshold_tokens))


def best_split(fleet: Fleet, demand: Demand) -> Split:
    """The threshold and the number of near prefill instances that serve most (the paper's grid search, eqs. 7 and 8).

    With more near prefill instances the prefill side can serve more and decode less, so the best is found by halving
    between those two, not by trying all.
    """

    def prefill_side(split: Split) -> float:
        far = split.far_per_s / split.far_share if split.far_share else float("inf")
        near = split.near_prefill_per_s / (1 - split.far_share) if split.far_share < 1 - 1e-12 else float("inf")
        return min(far, near)

    low, high = 0, fleet.near_instances - 1
    while low < high:
        middle = (low + high) // 2
        split = best_threshold(fleet, demand, middle)
        if prefill_side(split) >= split.decode_per_s * (1 - 1e-9):
            high = middle
        else:
            low = middle + 1
    tried = [best_threshold(fleet, demand, n) for n in {max(0, low - 1), low}]
    return max(tried, key=lambda split: (split.requests_per_s, split.threshold_tokens))


def homogeneous(near: Profile, instances: int, demand: Demand) -> Split:
    """The same kind of instance for everything, in one site: no link."""
    return best_split(Fleet(near=near, near_instances=instances, far=()), demand)


def naive(fleet: Fleet, demand: Demand) -> Split:
    """All prompts prefilled far, the near site only decodes."""
    return evaluate(fleet, demand, demand.lengths.least - 1, 0)
