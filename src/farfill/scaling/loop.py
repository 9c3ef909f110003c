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


async def look_once(
    loads: Loads, scaler: Scaler, sinks: list[Sink], report: Report, *, now_s: float, unix_s: float
) -> bool:
    """One decision. Whether everybody was told; who was not will be at the next change, from what is there then."""
    try:
        seen = await loads.read()
    except LoadUnknownError as error:
        _log.warning("nothing decided: %s (%s)", error, error.reason)
        return False
    changes = scaler.decide(seen, now_s, unix_s)
    report(seen, changes)
    told = True
    for sink in sinks if changes else []:
        try:
            await sink.tell(changes, unix_s)
        except ScalingFailedError as error:
            told = False
            _log.error("not told: %s (%s, sink %s)", error, error.reason, sink.name)
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
) -> None:
    """For ever; ends by cancellation."""
    while True:
        await look_once(loads, scaler, sinks, report, now_s=clock.now_s(), unix_s=clock.unix_s())
        await sleep(period_s)
