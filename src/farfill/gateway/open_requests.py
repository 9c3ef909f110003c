"""Requests in progress, which a gateway that may drain no longer ends so that their clients hear of it."""

from __future__ import annotations

import asyncio

import structlog

log = structlog.get_logger("farfill.gateway")


class OpenRequests:
    """Each is watched by the timeout it runs under. Owned by the event loop.

    One timer serves them all: nearly every request ends long before its own would ring, and setting each one costs.
    """

    def __init__(self) -> None:
        self._limits: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        """Whether a TimeoutError means that the gateway stops."""

    def begin(self, limit: asyncio.Timeout, timeout_s: float) -> None:
        """A request runs under `limit`, which has been entered without a time, for `timeout_s` at most."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self.ended:
            timeout_s = 0.0
            limit.reschedule(now_s)
        due_s = self._limits[limit] = now_s + timeout_s
        if self._timer is None or due_s < self._timer.when():
            self._set_timer(loop, due_s)

    def over(self, limit: asyncio.Timeout) -> None:
        """It does not any more."""
        self._limits.pop(limit, None)

    def end(self) -> None:
        """All of them, and those to come: with an error answer, or an error event where the answer has begun."""
        self.ended = True
        log.warning("requests_ended_at_once", requests=len(self._limits))
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    def _set_timer(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._ring, due_s)

    def _ring(self, due_s: float) -> None:
        """Time is up for some, unless they are over."""
        loop, self._timer = asyncio.get_running_loop(), None
        late = [limit for limit, limit_due_s in self._limits.items() if limit_due_s <= due_s]
        for limit in late:
            del self._limits[limit]
            if not limit.expired():
                limit.reschedule(loop.time())
        if self._limits:
            self._set_timer(loop, min(self._limits.values()))
