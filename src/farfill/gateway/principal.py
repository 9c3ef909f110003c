"""Who asks, once that is known: what it may use, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from farfill.gateway.access_source import ANYWHERE, Networks


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Of one key, over all gateways; 0: not limited. Bursts are `burst_s` seconds of a rate."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    burst_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """`name` is for logs and audit. `models` may have * as a wildcard. `salt` separates prefix KV within the tenant."""

    name: str
    tenant: str
    models: tuple[str, ...] = ("*",)
    salt: str = ""
    best_priority: int = -100
    limits: RateLimits | None = None
    allow_from: Networks = ANYWHERE

    def may_use(self, names: Sequence[str]) -> bool:
        """Whether a model of one of these names (its own, aliases) is among its models."""
        return any(fnmatchcase(name, pattern) for pattern in self.models for name in names)
