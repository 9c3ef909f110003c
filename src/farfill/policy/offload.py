"""Decides whether a remote prefill pays, once the decode instance is chosen. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from farfill.core.cluster import PlacementReason

REMOTE_REASONS = frozenset({PlacementReason.ABOVE_THRESHOLD, PlacementReason.FORCED_REMOTE, PlacementReason.FAR_CACHE})


class Forced(StrEnum):
    """What the client demanded with the placement header."""

    LOCAL = "local"
    REMOTE = "remote"


class PrefillAvailability(StrEnum):
    """Whether any prefill instance can take the prompt, and what stands in the way if not."""

    AVAILABLE = "available"
    NONE_READY = "none_ready"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    BREAKER_OPEN = "breaker_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadInputs:
    """`hit_tokens` is the prefix hit expected at the chosen decode instance."""

    prompt_tokens: int
    hit_tokens: int
    threshold_tokens: int
    availability: PrefillAvailability
    forced: Forced | None = None


_BLOCKED: dict[PrefillAvailability, PlacementReason] = {
    PrefillAvailability.NONE_READY: PlacementReason.NO_PREFILL_INSTANCE,
    PrefillAvailability.FINGERPRINT_MISMATCH: PlacementReason.FINGERPRINT_MISMATCH,
    PrefillAvailability.BREAKER_OPEN: PlacementReason.BREAKER_OPEN,
}


BLOCKED_REASONS = frozenset(_BLOCKED.values())
"""Reasons of prompts that should have gone far and could not."""


def uncached_tokens(prompt_tokens: int, hit_tokens: int) -> int:
    """Tokens somebody must prefill: the last prompt token is always computed by decode."""
    return max(0, prompt_tokens - 1 - hit_tokens)


def decide(inputs: OffloadInputs) -> PlacementReason:
    """The reason of the placement; it is remote exactly for `REMOTE_REASONS`.

    A prompt of one token has nothing to send, whoever demands it. A demand for remote is still subject to
    an instance that can serve it. A prompt that is cached in full is local even with a threshold of 0.
    """
    if inputs.forced is Forced.LOCAL:
        return PlacementReason.FORCED_LOCAL
    if inputs.prompt_tokens <= 1:
        return PlacementReason.TOO_SHORT
    uncached = uncached_tokens(inputs.prompt_tokens, inputs.hit_tokens)
    if inputs.forced is None and uncached < max(1, inputs.threshold_tokens):
        return PlacementReason.BELOW_THRESHOLD
    blocked = _BLOCKED.get(inputs.availability)
    if blocked is not None:
        return blocked
    return PlacementReason.ABOVE_THRESHOLD if inputs.forced is None else PlacementReason.FORCED_REMOTE
