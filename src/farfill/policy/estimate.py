"""Estimates how long a far prefill takes, from the ones that ended. Pure."""

from __future__ import annotations

_FASTER_WEIGHT = 0.5
_SLOWER_WEIGHT = 0.05


class PrefillEstimator:
    """Seconds per token of one prefill instance, prefill and transfer together.

    Follows improvements at once and slowdowns slowly: a link that just degraded must show as latency beyond
    the estimate instead of becoming the estimate.
    """

    def __init__(self) -> None:
        self._s_per_token: float | None = None

    def estimate_s(self, tokens: int) -> float | None:
        """Expected seconds for `tokens` (this prompt's and those queued before it); None before any sample."""
        return None if self._s_per_token is None else tokens * self._s_per_token

    def observe(self, tokens: int, seconds: float) -> None:
        """`tokens` took `seconds`. Ignored when there were no tokens."""
        if tokens <= 0:
            return
        sample = seconds / tokens
        if self._s_per_token is None:
            self._s_per_token = sample
            return
        weight = _FASTER_WEIGHT if sample < self._s_per_token else _SLOWER_WEIGHT
        self._s_per_token += weight * (sample - self._s_per_token)
