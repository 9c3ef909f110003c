"""The loop itself: look, decide, tell, wait."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from farfill.clock import Clock
from farfill.policy.scaling import Group, GroupLoad, Scaler, ScalingChange
from farfill.scaling.loads import LoadUnknownError
from farfill.scaling.sinks import ScalingFailedError, Sink

_log = logging.getLogger(__name__)
Report = Callable[[dict[Group, GroupLoad], tuple[ScalingChange, ...]], None]


class Loads(Protocol):
    """Where loads come from."""

    async def read(self) -> dict[Group, GroupLoad]: ...


class ScalingObserver(Protocol):
    """Hears what the loop does."""

    def looked(self, outcome: str, unix_s: float) -> None:
        """A look ended: "decided", or why not."""
        ...

    def group(self, site: str, role: str, *, ready: int, starting: int, busy: float, waiting_s: float) -> None:
        """What was seen of a group."""
        ...

    def changed(self, site: str, role: str, *, after: int, reason: str) -> None:
        """A group should have `after` instances."""
        ...

    def told(self, sink: str, *, ok: bool) -> None:
        """A sink was told of changes, or could not be."""
        ...


class SilentScalingObserver:
    """Tells nobody."""

    def looked(self, outcome: str, unix_s: float) -> None: ...

    def group(self, site: str, role: str, *, ready: int, starting: int, busy: float, waiting_s: float) -> None: ...

    def changed(self, site: str, role: str, *, after: int, reason: str) -> None: ...

    def told(self, sink: str, *, ok: bool) -> None: ...


_SILENT = SilentScalingObserver()


async def look_once(
    loads: Loads,
    scaler: Scaler,
    sinks: list[Sink],
    report: Report,
    *,
    now_s: float,
    unix_s: float,
    observer: ScalingObserver = _SILENT,
) -> bool:
    """One decision. Whether everybody was told; who was not will be at the next change, from what is there then."""
    try:
        seen = await loads.read()
    except LoadUnknownError as error:
        observer.looked(error.reason, unix_s)
        _log.warning("nothing decided: %s (%s)", error, error.reason)
        return False
    changes = scaler.decide(seen, now_s, unix_s)
    observer.looked("decided", unix_s)
    for group, load in seen.items():
        observer.group(
            group.site,
            group.role,
            ready=load.ready,
            starting=load.starting,
            busy=load.busy,
            waiting_s=load.waiting_s,
        )
    for change in changes:
        observer.changed(change.group.site, change.group.role, after=change.after, reason=str(change.reason))
    report(seen, changes)
    told = True
    for sink in sinks if changes else []:
        ok = True
        try:
            await sink.tell(changes, unix_s)
        except ScalingFailedError as error:
            told = ok = False
            _log.error("not told: %s (%s, sink %s)", error, error.reason, sink.name)
        observer.told(sink.name, ok=ok)
    return told


async def run_loop(
    loads: Loads,
    scaler: Scaler,
    sinks: list[Sink],
    report: Report,
    *,
    period_s: float,
    clock: Clock,
    sleep: Callable[[float], Awaitable[None]],
    observer: ScalingObserver = _SILENT,
) -> None:
    """For ever; ends by cancellation."""
    while True:
        await look_once(loads, scaler, sinks, report, now_s=clock.now_s(), unix_s=clock.unix_s(), observer=observer)
        await sleep(period_s)
