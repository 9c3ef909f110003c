"""Requests in progress, which a gateway that may drain no longer ends so that their clients hear of it."""

from __future__ import annotations

import asyncio

import structlog

log = structlog.get_logger("farfill.gateway")


class OpenRequests:
    """Each is watched by the timeout it runs under. Owned by the event loop."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self.ended = False
        """Whether a TimeoutError means that the gateway stops."""

    def begin(self, limit: asyncio.Timeout) -> None:
        """A request runs under `limit`, which has been entered."""
        self._limits.add(limit)
        if self.ended:
            limit.reschedule(asyncio.get_running_loop().time())

    def over(self, limit: asyncio.Timeout) -> None:
        """It does not any more."""
        self._limits.discard(limit)

    def end(self) -> None:
        """All of them, and those to come: with an error answer, or an error event where the answer has begun."""
        self.ended = True
        log.warning("requests_ended_at_once", requests=len(self._limits))
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
