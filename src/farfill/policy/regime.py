"""Bandwidth abundance and when to search the threshold again, as pure machines.

Abundant: a cached prefix may be used wherever it lies, copying it over the link if need be. Scarce: each site's cache
counts for prompts prefilled there only. Between the two bounds nothing changes, and no change follows another sooner
than `dwell_s`, so that a link near a bound does not flap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


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
    EGRESS_PRESSURE = "egress_pressure"
    RELIEF = "relief"


class SearchTrigger:
    """Keeps recent uncached lengths, and says when the threshold should be searched again.

    A surge of far prefill's queue or pressure on its links asks at once, at most once a period; when both were calm
    for a whole period after that, once more, so that what pressure changed is taken back.
    """

    def __init__(self, limits: RegimeLimits) -> None:
        self._limits = limits
        self._lengths: deque[int] = deque(maxlen=limits.window_lengths)
        self._searched_s: float | None = None
        self._strained = False

    def seen(self, uncached_tokens: int) -> None:
        """A prompt of so many uncached tokens was placed, wherever."""
        self._lengths.append(uncached_tokens)

    def lengths(self) -> tuple[int, ...]:
        """The latest ones, oldest first."""
        return tuple(self._lengths)

    def due(self, queue_s: float, utilisation: float, now_s: float) -> Trigger | None:
        """`queue_s`: seconds of work waiting at far prefill. A trigger counts as acted upon."""
        if self._searched_s is not None and now_s - self._searched_s < self._limits.research_period_s:
            return None
        trigger = None
        if utilisation > self._limits.target:
            trigger = Trigger.EGRESS_PRESSURE
        elif queue_s > self._limits.surge_queue_s:
            trigger = Trigger.QUEUE_SURGE
        elif self._strained:
            trigger = Trigger.RELIEF
        if trigger is not None:
            self._searched_s = now_s
            self._strained = trigger is not Trigger.RELIEF
        return trigger
