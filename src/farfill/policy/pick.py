"""Filters and picks instances: least work first, counting what the registry has not heard of yet. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.policy.offload import PrefillAvailability


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCandidate:
    """A decode instance, what this gateway has outstanding there, and the prefix hit expected there."""

    instance: Instance
    outstanding_tokens: int
    outstanding_requests: int
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCandidate:
    """A prefill instance and what this gateway has outstanding there."""

    instance: Instance
    outstanding_tokens: int
    outstanding_requests: int


def ready_decode(instances: Iterable[Instance], model: str) -> list[Instance]:
    """Instances that may decode `model` now."""
    return [i for i in instances if i.role is not Role.PREFILL and _serves(i, model)]


def ready_prefill(instances: Iterable[Instance], model: str, decode: Instance) -> list[Instance]:
    """Instances other than `decode` that may prefill `model` now."""
    return [i for i in instances if i.role is not Role.DECODE and i.name != decode.name and _serves(i, model)]


def pick_decode(candidates: Iterable[DecodeCandidate], prompt_tokens: int) -> DecodeCandidate | None:
    """The instance with the least tokens to compute before this prompt's first token; ties by name."""

    def cost(c: DecodeCandidate) -> tuple[int, int, str]:
        waiting = max(c.instance.queued_tokens, c.outstanding_tokens)
        running = max(c.instance.running_requests, c.outstanding_requests)
        return (waiting + prompt_tokens - c.hit_tokens, running, c.instance.name)

    return min(candidates, key=cost, default=None)


def pick_prefill(candidates: Iterable[PrefillCandidate]) -> PrefillCandidate | None:
    """The instance with the least tokens waiting; ties by name."""

    def cost(c: PrefillCandidate) -> tuple[int, int, str]:
        running = max(c.instance.running_requests, c.outstanding_requests)
        return (max(c.instance.queued_tokens, c.outstanding_tokens), running, c.instance.name)

    return min(candidates, key=cost, default=None)


def usable_prefill(
    prefills: Iterable[Instance], decode: Instance, allows: Callable[[Instance], bool]
) -> tuple[list[Instance], PrefillAvailability]:
    """Those with `decode`'s fingerprint that the breaker `allows`; if none, the first thing in the way."""
    ready = list(prefills)
    if not ready:
        return [], PrefillAvailability.NONE_READY
    same = [i for i in ready if i.fingerprint == decode.fingerprint]
    if not same:
        return [], PrefillAvailability.FINGERPRINT_MISMATCH
    allowed = [i for i in same if allows(i)]
    return allowed, PrefillAvailability.AVAILABLE if allowed else PrefillAvailability.BREAKER_OPEN


def _serves(instance: Instance, model: str) -> bool:
    return instance.state is InstanceState.READY and instance.model == model
