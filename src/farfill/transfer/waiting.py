"""Waiting on threads from an event loop without a thread for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.005


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` came true within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return True
