"""The offload decider: whether a prompt is prefilled far away, and at which site. Pure.

After PrfaaS (arXiv 2604.15039, section on the dual-timescale scheduler): the uncached length against a threshold. With
scarce bandwidth each site's cache counts for itself: what the near side lacks decides, and the far side computes what
*it* lacks. With abundant bandwidth the best prefix anywhere counts, and is copied if it lies elsewhere. Which site:
the one with the earliest first token by estimate, queue + prefill + what of the transfer prefill does not hide.

A fixed threshold is this very decider with a threshold nobody searches.
"""

from __future__ import annotations

import msgspec

from farfill.core.cluster import PlacementReason
from farfill.policy.offload import REMOTE_REASONS, Forced, uncached_tokens
from farfill.policy.regime import Bandwidth


class SiteInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One far site with an instance that could take the prompt; None where something was not measured yet.

    `hit_tokens` is the best prefix hit there. KV of n tokens is `kv_fixed_bytes` + n × `kv_bytes_per_token`; the fixed
    part (states, windows) leaves at the end. `chunk_tokens` are computed before the first bytes leave, and as many
    leave after the last one. `utilisation` is of the link to here, 0..1; `allowed`: breaker and allowlist let it.
    """

    site: str
    hit_tokens: int = 0
    queue_s: float = 0.0
    prefill_s_per_token: float | None = None
    link_bytes_per_s: float | None = None
    rtt_s: float = 0.0
    kv_bytes_per_token: float = 0.0
    kv_fixed_bytes: float = 0.0
    chunk_tokens: int = 2048
    utilisation: float = 0.0
    allowed: bool = True


class OffloadQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the decision depends on. `near_hit_tokens` is the hit at the decode instance that was chosen.

    `blocked` is why no site at all can take it (no instance, fingerprint, breaker), as the filters found. `in_rollout`:
    the request belongs to the share that may go far. `utilisation_limit`: a fuller link takes no more offloads.
    """

    prompt_tokens: int
    near_hit_tokens: int
    threshold_tokens: int
    bandwidth: Bandwidth = Bandwidth.SCARCE
    sites: tuple[SiteInputs, ...] = ()
    forced: Forced | None = None
    in_rollout: bool = True
    blocked: PlacementReason | None = None
    utilisation_limit: float = 0.95


class SiteEstimate(msgspec.Struct, frozen=True):
    """Seconds; `ttft_s` None: not measured yet. `uncached_tokens` are those the site would compute."""

    site: str
    uncached_tokens: int
    ttft_s: float | None
    queue_s: float
    prefill_s: float | None
    transfer_s: float | None


class OffloadDecision(msgspec.Struct, frozen=True):
    """`site` is set exactly when `reason` is a remote one. `compared_tokens` is what the threshold was held against.

    `copy_hit_tokens`: of the far prompt's prefix, so many tokens are cached near and need not be computed far (their KV
    would have to be copied there; 0 unless bandwidth is abundant).
    """

    reason: PlacementReason
    compared_tokens: int
    threshold_tokens: int
    site: str | None = None
    copy_hit_tokens: int = 0
    estimates: tuple[SiteEstimate, ...] = ()


def decide_offload(query: OffloadQuery) -> OffloadDecision:
    """Deterministic. A prompt of one token has nothing to send, whoever demands it."""
    usable = [s for s in query.sites if s.allowed and s.utilisation <= query.utilisation_limit]
    far_hit = max([s.hit_tokens for s in usable], default=0)
    hit = query.near_hit_tokens
    if query.bandwidth is Bandwidth.ABUNDANT:
        hit = max(hit, far_hit)
    compared = uncached_tokens(query.prompt_tokens, hit)
    reason = _reason(query, compared, usable)
    if reason is PlacementReason.FAR_CACHE:
        usable = [s for s in usable if s.hit_tokens == far_hit]
    elif reason not in REMOTE_REASONS:
        return OffloadDecision(reason, compared, query.threshold_tokens)
    estimates = tuple([estimate_site(query, site) for site in usable])
    chosen = 0
    if len(usable) > 1:
        chosen = min(range(len(usable)), key=lambda i: _order(estimates[i], usable[i]))
    copied = 0
    if query.bandwidth is Bandwidth.ABUNDANT:
        copied = max(0, query.near_hit_tokens - usable[chosen].hit_tokens)
    return OffloadDecision(reason, compared, query.threshold_tokens, usable[chosen].site, copied, estimates)


def estimate_site(query: OffloadQuery, site: SiteInputs) -> SiteEstimate:
    """TTFT = queue + prefill + the part of the transfer that prefill does not hide + one round trip.

    KV leaves while later chunks are computed: hidden is what the link carries between the first chunk's end and the
    last one's; the last chunk and the states never are. All of the prompt's KV travels, whatever was cached far.
    """
    hit = site.hit_tokens
    if query.bandwidth is Bandwidth.ABUNDANT:
        hit = max(hit, query.near_hit_tokens)
    uncached = uncached_tokens(query.prompt_tokens, hit)
    prefill_s = None if site.prefill_s_per_token is None else uncached * site.prefill_s_per_token
    transfer_s = None
    if site.link_bytes_per_s is not None and prefill_s is not None:
        sent = max(0, query.prompt_tokens - 1 - query.near_hit_tokens)
        rows_s = sent * site.kv_bytes_per_token / site.link_bytes_per_s
        fixed_s = site.kv_fixed_bytes / site.link_bytes_per_s
        last = min(1.0, site.chunk_tokens / max(1, uncached))
        hidden_s = min(rows_s * (1 - last), prefill_s * (1 - last))
        transfer_s = rows_s - hidden_s + fixed_s + site.rtt_s
    ttft_s = None if prefill_s is None or transfer_s is None else site.queue_s + prefill_s + transfer_s
    return SiteEstimate(site.site, uncached, ttft_s, site.queue_s, prefill_s, transfer_s)


def _reason(query: OffloadQuery, compared: int, usable: list[SiteInputs]) -> PlacementReason:  # noqa: PLR0911
    if query.forced is Forced.LOCAL:
        return PlacementReason.FORCED_LOCAL
    if query.prompt_tokens <= 1:
        return PlacementReason.TOO_SHORT
    threshold = max(1, query.threshold_tokens)
    if query.forced is None and compared < threshold:
        # Short only thanks to a prefix that lies far: its KV has to come from there, or near would compute all of it.
        lacks = uncached_tokens(query.prompt_tokens, query.near_hit_tokens) >= threshold
        from_far = lacks and query.in_rollout and query.blocked is None and usable
        return PlacementReason.FAR_CACHE if from_far else PlacementReason.BELOW_THRESHOLD
    if query.forced is None and not query.in_rollout:
        return PlacementReason.ROLLOUT
    if query.blocked is not None:
        return query.blocked
    if not usable:
        if not query.sites:
            return PlacementReason.NO_PREFILL_INSTANCE
        busy = any(site.allowed for site in query.sites)
        return PlacementReason.LINK_BUSY if busy else PlacementReason.BREAKER_OPEN
    return PlacementReason.ABOVE_THRESHOLD if query.forced is None else PlacementReason.FORCED_REMOTE


def _order(estimate: SiteEstimate, site: SiteInputs) -> tuple[int, float, int, str]:
    """An idle site never measured comes first, so that it gets measured; then by TTFT; then those being measured."""
    if estimate.ttft_s is not None:
        return 1, estimate.ttft_s, -site.hit_tokens, site.site
    return (2 if site.queue_s > 0 else 0), site.queue_s, -site.hit_tokens, site.site
