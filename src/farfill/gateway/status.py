"""What one gateway sees now, for `farfill top`: traffic of the last minute, links, breakers, shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

import msgspec

from farfill.clock import Clock
from farfill.core.cluster import FallbackReason
from farfill.gateway.observe import RequestSummary

WINDOW_S = 60.0
MAX_REQUESTS = 20_000


class TrafficStatus(msgspec.Struct, kw_only=True):
    """Of the last `window_s` seconds. TTFT in seconds, None without any."""

    window_s: float
    requests_per_s: float
    failed_per_s: float
    rejected_per_s: float
    fallbacks_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    far_ratio: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None


class LinkStatus(msgspec.Struct, kw_only=True):
    """A far site and the link from it; None where nothing was measured yet."""

    site: str
    breaker: str
    bytes_per_s: float | None
    rtt_s: float | None
    utilisation: float
    bandwidth: str


class ShareStatus(msgspec.Struct, kw_only=True):
    """A rollout share as this gateway applies it."""

    model: str
    tenant: str
    percent: float
    version: int
    automatic: bool


class GatewayStatus(msgspec.Struct, kw_only=True):
    """One gateway process. `breakers` by prefill instance, those that are not closed; `outstanding_tokens` by instance.

    `needs_restart`: keys of the configuration in force that this process does not follow until it is started anew.
    """

    gateway: str
    site: str
    version: str
    registry_away_s: float
    requests_in_progress: int
    threshold_tokens: int
    index_blocks: int
    exact_workers: int
    config_version: int = 0
    needs_restart: list[str] = []
    traffic: TrafficStatus
    links: list[LinkStatus]
    breakers: dict[str, str]
    outstanding_tokens: dict[str, int]
    shares: list[ShareStatus]


@dataclass(slots=True)
class _Seen:
    at_s: float
    outcome: str
    placement: str
    fallback: bool
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None


@dataclass(slots=True)
class Traffic:
    """The requests that ended lately."""

    clock: Clock
    _seen: deque[_Seen] = field(default_factory=lambda: deque[_Seen](maxlen=MAX_REQUESTS))

    def finished(self, summary: RequestSummary) -> None:
        """One more."""
        fallback = summary.fallback is not FallbackReason.NONE
        self._seen.append(
            _Seen(
                self.clock.now_s(),
                summary.outcome,
                summary.placement,
                fallback,
                summary.prompt_tokens,
                summary.completion_tokens,
                summary.ttft_s,
            )
        )

    def status(self) -> TrafficStatus:
        """Of the last minute; of less, where more requests ended than are kept."""
        now_s = self.clock.now_s()
        while self._seen and self._seen[0].at_s < now_s - WINDOW_S:
            self._seen.popleft()
        full = len(self._seen) == MAX_REQUESTS
        window_s = max(1.0, now_s - self._seen[0].at_s) if full else WINDOW_S
        seen = list(self._seen)
        placed = [s for s in seen if s.placement != "none"]
        ttfts = sorted(s.ttft_s for s in seen if s.ttft_s is not None)
        return TrafficStatus(
            window_s=window_s,
            requests_per_s=len(seen) / window_s,
            failed_per_s=sum(s.outcome == "error" for s in seen) / window_s,
            rejected_per_s=sum(s.outcome == "rejected" for s in seen) / window_s,
            fallbacks_per_s=sum(s.fallback for s in seen) / window_s,
            prompt_tokens_per_s=sum(s.prompt_tokens for s in seen) / window_s,
            output_tokens_per_s=sum(s.output_tokens for s in seen) / window_s,
            far_ratio=sum(s.placement == "remote" for s in placed) / len(placed) if placed else None,
            ttft_p50_s=_quantile(ttfts, 0.5),
            ttft_p95_s=_quantile(ttfts, 0.95),
        )


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return ordered[max(0, ceil(q * len(ordered)) - 1)] if ordered else None
