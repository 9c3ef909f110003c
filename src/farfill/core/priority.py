"""Which request goes first: a number, lower first, as in vLLM."""

from __future__ import annotations

from farfill.core.errors import InvalidRequestError

MIN_PRIORITY = -100
MAX_PRIORITY = 100


def check_priority(priority: int) -> int:
    """The priority itself; raises InvalidRequestError out of bounds, so that nobody can outbid all others for ever."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"priority must be from {MIN_PRIORITY} to {MAX_PRIORITY}", param="priority")
    return priority
