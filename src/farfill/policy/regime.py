"""Bandwidth abundance and when to search the threshold again, as pure machines.

Abundant: a cached prefix may be used wherever it lies, copying it over the link if need be. Scarce: each site's cache
counts for prompts prefilled there only. Between the two bounds nothing changes, and no change follows another sooner
than `dwell_s`, so that a link near a bound does not flap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

_SAME = 0.5
"""Capacities that differ by less of the larger are the same."""


class Bandwidth(StrEnum):
    """How freely the link may be used."""

    ABUNDANT = "abundant"
    SCARCE = "scarce"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeLimits:
    """Utilisations 0..1 of the measured rate. `target` is what offloading may fill a link to."""

    target: float = 0.7
    scarce_above: float = 0.7
    abundant_below: float = 0.5
    dwell_s: float = 10.0
    surge_queue_s: float = 2.0
    research_period_s: float = 5.0
    window_lengths: int = 2048

    def __post_init__(self) -> None:
        if not 0 < self.abundant_below < self.scarce_above <= 1:
            raise ValueError("0 < abundant_below < scarce_above <= 1 must hold")


class BandwidthRegime:
    """One link. It begins scarce: that costs only a recomputed prefix."""

    def __init__(self, limits: RegimeLimits) -> None:
        self._limits = limits
        self._state = Bandwidth.SCARCE
        self._since_s: float | None = None

    @property
    def state(self) -> Bandwidth:
        """As of the last observation."""
        return self._state

    def observe(self, utilisation: float, now_s: float) -> Bandwidth:
        """`utilisation`: bytes sent lately over what the link was measured to carry."""
        if self._since_s is not None and now_s - self._since_s < self._limits.dwell_s:
            return self._state
        wanted = self._state
        if utilisation > self._limits.scarce_above:
            wanted = Bandwidth.SCARCE
        elif utilisation < self._limits.abundant_below:
            wanted = Bandwidth.ABUNDANT
        if wanted is not self._state:
            self._state, self._since_s = wanted, now_s
        return self._state


class Trigger(StrEnum):
    """Why the threshold is searched again."""

    QUEUE_SURGE = "queue_surge"
    NEAR_SURGE = "near_surge"
    EGRESS_PRESSURE = "egress_pressure"
    CAPACITY = "capacity"
    RELIEF = "relief"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strain:
    """What is seen now. Queues in seconds of work that wait for an instance; `utilisation` 0..1 of the fullest link.

    `capacities` are what a search rests on: instances that can be used, rates of links that carry something, always in
    the same order. 0: nothing there, or cut.
    """

    far_queue_s: float
    near_queue_s: float
    utilisation: float
    capacities: tuple[float, ...] = ()


class SearchTrigger:
    """Keeps recent uncached lengths, and says when the threshold should be searched again.

    A surge of far or near prefill's queue or pressure on links asks at once, and so do instances or links that are not
    what they were at the last search: what a cut link made right is wrong once it is back. At most once a period. When
    all were calm for a whole period after that, it asks once more, so that what pressure changed is taken back.
    """

    def __init__(self, limits: RegimeLimits) -> None:
        self._limits = limits
        self._lengths: deque[int] = deque(maxlen=limits.window_lengths)
        self._searched_s: float | None = None
        self._searched_for: tuple[float, ...] | None = None
        self._strained = False

    def seen(self, uncached_tokens: int) -> None:
        """A prompt of so many uncached tokens was placed, wherever."""
        self._lengths.append(uncached_tokens)

    def lengths(self) -> tuple[int, ...]:
        """The latest ones, oldest first."""
        return tuple(self._lengths)

    def due(self, strain: Strain, now_s: float) -> Trigger | None:
        """Whether to search now, and why. A trigger counts as acted upon."""
        if self._searched_for is None:
            self._searched_for = strain.capacities
        if self._searched_s is not None and now_s - self._searched_s < self._limits.research_period_s:
            return None
        trigger = self._asks(strain)
        if trigger is not None:
            self.searched(strain, now_s)
            self._strained = trigger is not Trigger.RELIEF
        return trigger

    def searched(self, strain: Strain, now_s: float) -> None:
        """The threshold was searched, for this or another reason."""
        self._searched_s, self._searched_for = now_s, strain.capacities

    def _asks(self, strain: Strain) -> Trigger | None:
        if strain.utilisation > self._limits.target:
            return Trigger.EGRESS_PRESSURE
        if strain.far_queue_s > self._limits.surge_queue_s:
            return Trigger.QUEUE_SURGE
        if strain.near_queue_s > self._limits.surge_queue_s:
            return Trigger.NEAR_SURGE
        if _differ(strain.capacities, self._searched_for or ()):
            return Trigger.CAPACITY
        return Trigger.RELIEF if self._strained else None


def _differ(now: tuple[float, ...], then: tuple[float, ...]) -> bool:
    """Whether any is less than half, or more than twice, what it was."""
    if len(now) != len(then):
        return True
    return any(abs(one - other) > _SAME * max(one, other) for one, other in zip(now, then, strict=True))
