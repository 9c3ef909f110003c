"""The registry's state: leases that must be renewed, and a revision that moves on with every change.

Pure: time comes in as `now_s`. Guarantees: an instance is listed until its lease runs out or it leaves; a
restarted worker replaces its former self at once, and the former self can neither come back nor remove it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from farfill.core.cluster import Instance

_REMEMBERED_GENERATIONS = 16


@dataclass(slots=True)
class _Lease:
    instance: Instance
    expires_s: float


class RegistryStore:
    """Owned by one event loop. `revision` starts at `first_revision`, which must differ between restarts."""

    def __init__(self, lease_s: float, first_revision: int = 1) -> None:
        self.lease_s = lease_s
        self.first_revision = first_revision
        self.revision = first_revision
        self._leases: dict[str, _Lease] = {}
        self._superseded: dict[str, deque[str]] = {}

    def put(self, instance: Instance, now_s: float) -> Literal["registered", "renewed", "superseded"]:
        """Register or renew. Superseded: another generation of this name took over, nothing was changed."""
        if instance.generation in self._superseded.get(instance.name, ()):
            return "superseded"
        held = self._leases.get(instance.name)
        self._leases[instance.name] = _Lease(instance, now_s + self.lease_s)
        if held is None or held.instance != instance:
            self.revision += 1
        if held is not None and held.instance.generation == instance.generation:
            return "renewed"
        if held is not None:
            former = self._superseded.setdefault(instance.name, deque(maxlen=_REMEMBERED_GENERATIONS))
            former.append(held.instance.generation)
        return "registered"

    def remove(self, name: str, generation: str) -> bool:
        """Take `name` off the list, if it still is of `generation`. Returns whether it was there."""
        held = self._leases.get(name)
        if held is None or held.instance.generation != generation:
            return False
        del self._leases[name]
        self.revision += 1
        return True

    def expire(self, now_s: float) -> list[Instance]:
        """Drop instances whose lease ran out; returns them."""
        gone = [lease.instance for lease in self._leases.values() if lease.expires_s <= now_s]
        for instance in gone:
            del self._leases[instance.name]
        self.revision += bool(gone)
        return gone

    def instances(self) -> tuple[Instance, ...]:
        """All live instances, by name."""
        return tuple(self._leases[name].instance for name in sorted(self._leases))
