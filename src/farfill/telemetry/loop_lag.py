"""Measures how late the event loop wakes timers: whatever blocks it shows here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.05


async def watch_loop_lag(observe: Callable[[float], None], period_s: float = PERIOD_S) -> None:
    """Call `observe` with the seconds of lag, every `period_s`, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + period_s
        await asyncio.sleep(period_s)
        observe(max(0.0, loop.time() - due_s))
