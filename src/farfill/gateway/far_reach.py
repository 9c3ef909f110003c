"""Prefill workers that cannot be connected to: an unreachable site costs one connect timeout, once.

When connecting to a worker timed out, every prefill worker of its site counts as lost until it was reached from the
background: at once, then ever less often. A site that is fine apart from one host is back within a round trip; one
that is cut off costs no further request anything. Workers that refuse connections are gone; that costs nothing and is
for the registry to tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from farfill.core.cluster import Instance, Role
from farfill.gateway.background import BackgroundWork

log = structlog.get_logger("farfill.gateway")

FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 5.0

Probe = Callable[[Instance], Awaitable[bool]]
"""Whether a connection can be made now, within the connect timeout."""


class FarReach:
    """Owned by the event loop. `changed` hears of each instance that is lost (True) or back (False)."""

    def __init__(
        self,
        instances: Callable[[], tuple[Instance, ...]],
        probe: Probe,
        background: BackgroundWork,
        changed: Callable[[Instance, bool], None] = lambda _instance, _lost: None,
    ) -> None:
        self._instances = instances
        self._probe = probe
        self._background = background
        self._changed = changed
        self._lost: set[tuple[str, str]] = set()

    def lost(self, instance: Instance) -> bool:
        """Whether it counts as unreachable now."""
        return bool(self._lost) and (instance.name, instance.generation) in self._lost

    def timed_out(self, instance: Instance) -> None:
        """Connecting to `instance` took as long as it may. Decode workers are `health.DecodeReach`'s business."""
        if instance.role is Role.DECODE or self.lost(instance):
            return
        site = [i for i in self._instances() if i.site == instance.site and i.role is not Role.DECODE]
        log.warning("site_unreachable", worker_site=instance.site, instance=instance.name, workers=len(site))
        for other in site:
            if not self.lost(other):
                self._lost.add((other.name, other.generation))
                self._changed(other, True)
                self._background.spawn(self._until_reached(other), f"reach-{other.name}")

    async def _until_reached(self, instance: Instance) -> None:
        pause_s = FIRST_PAUSE_S
        try:
            while self._listed(instance) and not await self._probe(instance):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        finally:
            self._lost.discard((instance.name, instance.generation))
            self._changed(instance, False)
        log.info("worker_reachable", worker_site=instance.site, instance=instance.name)

    def _listed(self, instance: Instance) -> bool:
        """Whether the registry still has this life of it."""
        return any((i.name, i.generation) == (instance.name, instance.generation) for i in self._instances())
