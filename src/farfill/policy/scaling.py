"""The slow loop: how many instances of each role each site should have, and who changes roles. A pure machine.

PrfaaS (arXiv 2604.15039) re-balances prefill and decode over hours: a prompt's stages should be equally far from their
limits (equations 7 and 8). Offered work in busy instances says how far: that of prefill and of decode are comparable,
so the stage over its limit takes an instance from one with room, or a new one. Counts are sized for `target`; they grow
above `out_above` and shrink below `in_below`, and the gap between those is what keeps a steady load from flapping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

DAY_MINUTES = 1440
_WEEK_DAYS = 7
_EPOCH_WEEKDAY = 3  # 1 January 1970 was a Thursday; Monday is 0


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Instances of one role at one site."""

    site: str
    role: str

    def __str__(self) -> str:
        return f"{self.site}/{self.role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Fewest and most instances, and the price of one for an hour."""

    minimum: int
    maximum: int
    price: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Other bounds for a group from `from_minute` to `to_minute` of the day (past midnight if that is earlier).

    Cheap hours of a far site, say: more of its instances while others sleep. `days`: 0 is Monday; empty: every day,
    by the day it begins on. `utc_offset_minutes` makes the clock local.
    """

    group: Group
    from_minute: int
    to_minute: int
    minimum: int
    maximum: int
    days: tuple[int, ...] = ()
    utc_offset_minutes: int = 0

    def holds(self, unix_s: float) -> bool:
        """Whether it applies now."""
        minutes = int(unix_s // 60) + self.utc_offset_minutes
        day, minute = divmod(minutes, DAY_MINUTES)
        if self.from_minute < self.to_minute:
            return self.from_minute <= minute < self.to_minute and self._on(day)
        return (minute >= self.from_minute and self._on(day)) or (minute < self.to_minute and self._on(day - 1))

    def _on(self, day: int) -> bool:
        return not self.days or (day + _EPOCH_WEEKDAY) % _WEEK_DAYS in self.days


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits:
    """Utilisations 0..1. Work that waits is to be gone within `drain_s`. `convert` names sites whose instances may
    change their role; `price_limit` is for all groups together, per hour."""

    target: float = 0.7
    out_above: float = 0.85
    in_below: float = 0.5
    drain_s: float = 60.0
    cooldown_out_s: float = 60.0
    cooldown_in_s: float = 300.0
    convert: frozenset[str] = frozenset()
    price_limit: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.in_below < self.target < self.out_above <= 1:
            raise ValueError("0 < in_below < target < out_above <= 1 must hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """What was seen since the last decision. `busy`: instances' worth of work done at a time; `waiting_s`: seconds of
    work of one instance that wait. `starting` instances are paid and will come."""

    ready: int
    busy: float
    starting: int = 0
    waiting_s: float = 0.0


class ScalingReason(StrEnum):
    """Stable: report, webhook and metric label."""

    BUSY = "busy"
    IDLE = "idle"
    CONVERTED = "converted"
    BOUNDS = "bounds"


@dataclass(frozen=True, slots=True)
class ScalingChange:
    """`group` should have `after` instances instead of `before`. `converted`: so many of the change are instances that
    come from, or go to, the other role of the same site."""

    group: Group
    before: int
    after: int
    reason: ScalingReason
    converted: int = 0
    utilisation: float = 0.0


class Scaler:
    """Ask `decide` once a period. What it answers is taken as done: the next load must tell."""

    def __init__(
        self, limits: ScalingLimits, groups: Mapping[Group, GroupLimits], schedules: Sequence[Schedule] = ()
    ) -> None:
        for group, given in groups.items():
            if not 0 <= given.minimum <= given.maximum:
                raise ValueError(f"{group}: 0 <= minimum <= maximum must hold")
        self._limits = limits
        self._groups = dict(sorted(groups.items()))
        self._schedules = tuple(schedules)
        self._grown_s: dict[Group, float] = {}
        self._changed_s: dict[Group, float] = {}
        self._wanted: dict[Group, deque[tuple[float, int]]] = {group: deque() for group in self._groups}

    def decide(
        self, loads: Mapping[Group, GroupLoad], now_s: float, unix_s: float | None = None
    ) -> tuple[ScalingChange, ...]:
        """Changes, those of the busiest groups first. Groups of which nothing was seen stay. `now_s` is any steady
        clock, `unix_s` the time of day for schedules (`now_s` if not given)."""
        seen = {group: loads[group] for group in self._groups if group in loads}
        bounds = {group: self.bounds(group, now_s if unix_s is None else unix_s) for group in seen}
        present = {group: load.ready + load.starting for group, load in seen.items()}
        offered = {group: load.busy + load.waiting_s / self._limits.drain_s for group, load in seen.items()}
        needed = {group: _clamped(ceil(offered[group] / self._limits.target - 1e-9), bounds[group]) for group in seen}
        for group, count in needed.items():
            self._remember(group, count, now_s)
        after = dict(present)
        reasons: dict[Group, ScalingReason] = {}
        converted: dict[Group, int] = dict.fromkeys(seen, 0)
        used = {group: offered[group] / max(1, present[group]) for group in seen}
        for group in sorted(seen, key=lambda g: (-used[g], g)):
            self._grow(group, now_s, offered, needed, after, reasons, converted)
        for group in seen:
            if group not in reasons:
                self._shrink(group, now_s, offered, present, after, reasons)
            inside = _clamped(after[group], bounds[group])
            if inside != after[group]:
                after[group], reasons[group] = inside, ScalingReason.BOUNDS
        self._within_price(present, after, converted, sorted(seen, key=lambda g: (used[g], g)))
        changes = [
            ScalingChange(g, present[g], after[g], reasons[g], converted[g], used[g])
            for g in sorted(seen, key=lambda g: (-used[g], g))
            if after[g] != present[g]
        ]
        for change in changes:
            self._changed_s[change.group] = now_s
            if change.after > change.before:
                self._grown_s[change.group] = now_s
        return tuple(changes)

    def bounds(self, group: Group, unix_s: float) -> tuple[int, int]:
        """Fewest and most instances at that time: the first schedule that holds, or the group's own."""
        for schedule in self._schedules:
            if schedule.group == group and schedule.holds(unix_s):
                return schedule.minimum, schedule.maximum
        return self._groups[group].minimum, self._groups[group].maximum

    def _grow(  # noqa: PLR0917 (one decision's working state)
        self,
        group: Group,
        now_s: float,
        offered: Mapping[Group, float],
        needed: Mapping[Group, int],
        after: dict[Group, int],
        reasons: dict[Group, ScalingReason],
        converted: dict[Group, int],
    ) -> None:
        limits = self._limits
        short = needed[group] - after[group]
        cooling = now_s - self._grown_s.get(group, -limits.cooldown_out_s) < limits.cooldown_out_s
        if short <= 0 or cooling or offered[group] <= limits.out_above * after[group]:
            return
        if group.site in limits.convert:
            for other, count in list(after.items()):
                spare = count - needed[other]
                # Only what would not be missed at once: the giver must stay below where it would ask for more.
                if other.site == group.site and other != group and spare > 0 and other not in reasons:
                    moved = min(spare, short)
                    after[other] -= moved
                    after[group] += moved
                    converted[other] -= moved
                    converted[group] += moved
                    reasons[other] = reasons[group] = ScalingReason.CONVERTED
                    short -= moved
        if short > 0:
            after[group] += short
            reasons.setdefault(group, ScalingReason.BUSY)

    def _shrink(  # noqa: PLR0917 (one decision's working state)
        self,
        group: Group,
        now_s: float,
        offered: Mapping[Group, float],
        present: Mapping[Group, int],
        after: dict[Group, int],
        reasons: dict[Group, ScalingReason],
    ) -> None:
        limits = self._limits
        if offered[group] >= limits.in_below * present[group]:
            return
        remembered = self._wanted[group]
        watched_s = now_s - remembered[0][0]
        since_s = now_s - self._changed_s.get(group, -limits.cooldown_in_s)
        if watched_s < limits.cooldown_in_s or since_s < limits.cooldown_in_s:
            return
        enough = max(count for _, count in remembered)
        if enough < present[group]:
            after[group], reasons[group] = enough, ScalingReason.IDLE

    def _within_price(
        self,
        present: Mapping[Group, int],
        after: dict[Group, int],
        converted: Mapping[Group, int],
        order: Sequence[Group],
    ) -> None:
        """Growth that would cost too much is taken back, in this order; conversions stay."""
        limit = self._limits.price_limit
        if limit is None:
            return
        for group in order:
            floor = present[group] + max(0, converted[group])
            while after[group] > floor and self._price(after) > limit + 1e-9:
                after[group] -= 1

    def _price(self, counts: Mapping[Group, int]) -> float:
        return sum(self._groups[group].price * count for group, count in counts.items())

    def _remember(self, group: Group, count: int, now_s: float) -> None:
        remembered = self._wanted[group]
        remembered.append((now_s, count))
        # One sample older than the window stays: it says that the window is full.
        while len(remembered) > 1 and remembered[1][0] <= now_s - self._limits.cooldown_in_s:
            remembered.popleft()


def _clamped(count: int, bounds: tuple[int, int]) -> int:
    return max(bounds[0], min(bounds[1], count))
