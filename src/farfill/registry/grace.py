"""After an outage of the registry, or of its store, who is missing may only have been unable to renew. Pure.

Leases run out while nobody can be heard. When that is over, the cluster would look empty until the workers' next try;
so whoever was known before stays for a while longer, unless it comes back as another process or said that it leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from farfill.core.cluster import Instance


class Grace:
    """`grace_s` must be as long as a worker takes, at most, to register again."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._until_s = -inf

    def outage_ended(self, now_s: float) -> None:
        """They may be heard again."""
        self._until_s = now_s + self._grace_s

    def left_s(self, now_s: float) -> float:
        """For how long yet somebody missing may stay; 0 when nobody may."""
        return max(0.0, self._until_s - now_s)

    def merge(
        self, before: Iterable[Instance], found: Iterable[Instance], now_s: float, left: Collection[str] = ()
    ) -> tuple[Instance, ...]:
        """Those `found`, and those known `before` that still have time; by name. `left` are names that said goodbye."""
        merged = {instance.name: instance for instance in found}
        if self.left_s(now_s) > 0:
            for instance in before:
                if instance.name not in left:
                    merged.setdefault(instance.name, instance)
        return tuple(merged[name] for name in sorted(merged))
