"""Sections of the cluster file that say where prompts go: placement, offload, breakers, fallback, rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from farfill.config.section import Section

Picker = Literal["best", "spread"]


class CircuitBreakerConfig(Section):
    error_rate_limit: float = Field(
        default=0.05, gt=0, le=1, description="Share of failed far prefills that opens an instance's breaker."
    )
    site_error_rate_limit: float = Field(
        default=0.5, gt=0, le=1, description="Share of far prefills of a whole site that opens the site's breaker."
    )
    latency_p99_limit_ms: int = Field(
        default=2500, ge=1, description="p99 of far prefill beyond its estimate, in ms, that opens the breaker."
    )
    window_s: float = Field(default=30.0, gt=0, le=3600, description="Seconds of history the breaker looks at.")
    min_requests: int = Field(
        default=10, ge=1, description="Fewer far prefills than this in the window never open the breaker."
    )
    open_s: float = Field(default=10.0, gt=0, le=3600, description="Seconds until an open breaker lets probes through.")
    half_open_probes: int = Field(
        default=1, ge=1, le=100, description="Probes that must succeed for an open breaker to close."
    )


class DecodeWeights(Section):
    """Scorers of decode instances; 0 leaves one out."""

    least_work: float = Field(default=4.0, ge=0, description="Weight of the earliest first token.")
    session_affinity: float = Field(default=1.0, ge=0, description="Weight of the session's own instance.")
    prefix_affinity: float = Field(default=1.0, ge=0, description="Weight of the longest cached prefix.")
    queue_depth: float = Field(default=0.5, ge=0, description="Weight of few requests.")
    kv_bytes: float = Field(default=0.5, ge=0, description="Weight of free KV memory.")
    tenant_share: float = Field(default=0.25, ge=0, description="Weight of little work of the same tenant.")
    outstanding_tokens: float = Field(default=0.0, ge=0, description="Weight of few waiting prompt tokens.")


class PrefillWeights(Section):
    """Scorers of prefill instances; 0 leaves one out."""

    least_work: float = Field(default=1.0, ge=0, description="Weight of the earliest first token.")
    session_affinity: float = Field(default=0.0, ge=0, description="Weight of the session's own instance.")
    prefix_affinity: float = Field(default=0.0, ge=0, description="Weight of the longest cached prefix.")
    queue_depth: float = Field(default=0.1, ge=0, description="Weight of few requests.")
    kv_bytes: float = Field(default=0.0, ge=0, description="Weight of free KV memory.")
    tenant_share: float = Field(default=0.0, ge=0, description="Weight of little work of the same tenant.")
    outstanding_tokens: float = Field(default=0.0, ge=0, description="Weight of few waiting prompt tokens.")


class PlacementConfig(Section):
    decode_weights: DecodeWeights = DecodeWeights()
    prefill_weights: PrefillWeights = PrefillWeights()
    picker: Picker = Field(
        default="best",
        description="best: the highest score; spread: one of the close ones, a different one for each request, where"
        " several gateways share the workers.",
    )


class FallbackBudgetConfig(Section):
    tokens_per_s: float = Field(
        default=0.0,
        ge=0,
        description="Prompt tokens a second that decode may prefill because far prefill failed or cannot be had; beyond"
        " it 503. 0: not limited. Of each gateway process.",
    )
    burst_s: float = Field(default=10.0, gt=0, le=3600, description="Seconds of tokens_per_s that may come at once.")
    max_concurrent: int = Field(default=64, ge=1, description="Such prompts at once; beyond it 503.")
    itl_limit_ms: float = Field(
        default=0.0,
        ge=0,
        description="No such prompt starts while the p99 gap between tokens is longer, in ms; 0: no guard.",
    )


class RolloutConfig(Section):
    """Guards of an automatic rollout (`farfill rollout auto`)."""

    min_step_s: float = Field(default=300.0, ge=0, description="Shortest time at one share.")
    min_requests: int = Field(default=100, ge=1, description="Fewest far prefills at one share.")
    parity_sample: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of greedy answers of far prefill whose first tokens are computed again near and compared, as"
        " far as the fallback budget has room; one that differs takes everything back. 0: none.",
    )
    min_parity_samples: int = Field(default=0, ge=0, description="Fewest such comparisons at one share.")
    success_rate: float = Field(
        default=0.995, gt=0, le=1, description="Share of far prefills that must succeed; below it everything goes back."
    )
    ttft_ratio_hold: float = Field(
        default=1.0, gt=0, description="p95 of TTFT, far over near, above which the share stays as it is."
    )
    ttft_ratio_revert: float = Field(
        default=1.5, gt=0, description="p95 of TTFT, far over near, above which everything goes back."
    )
    version_ttft_ratio_hold: float = Field(
        default=1.2,
        gt=0,
        description="p95 of TTFT, new worker version over old, above which its share stays as it is.",
    )
    link_utilisation: float = Field(
        default=0.7, gt=0, le=1, description="Utilisation of a link above which the share stays as it is."
    )


class RoutingConfig(Section):
    remote_prefill_threshold_tokens: int = Field(
        default=4096, ge=0, description="Prompts with at least this many uncached tokens are prefilled far away."
    )
    max_deaths_per_request: int = Field(
        default=2,
        ge=1,
        le=10,
        description="A request during whose work so many instances died is ended with 500 (request_kills_workers)"
        " instead of being tried elsewhere.",
    )
    threshold: Literal["static", "auto"] = Field(
        default="static",
        description="static: remote_prefill_threshold_tokens as it stands; auto: it is where the search begins, on the"
        " latest prompts' lengths and what was measured of workers and links.",
    )
    threshold_min_tokens: int = Field(default=512, ge=0, description="Lowest threshold that auto may find.")
    threshold_max_tokens: int = Field(default=262_144, ge=0, description="Highest threshold that auto may find.")
    threshold_period_s: float = Field(
        default=5.0, gt=0, le=3600, description="auto searches at most this often, in seconds."
    )
    link_utilisation_target: float = Field(
        default=0.7, gt=0, le=1, description="What far prefill may fill a link to; auto searches above it."
    )
    link_utilisation_limit: float = Field(
        default=0.95, gt=0, le=1, description="A link fuller than this takes no more far prefills."
    )
    cache_scope: Literal["auto", "site", "anywhere"] = Field(
        default="auto",
        description="Which prefix hits count. site: the decode instance's; anywhere: the best one; auto: anywhere while"
        " links have room.",
    )
    link_scarce_above: float = Field(
        default=0.7, gt=0, le=1, description="cache_scope auto: utilisation above which a link has no room."
    )
    link_abundant_below: float = Field(
        default=0.5, gt=0, le=1, description="cache_scope auto: utilisation below which a link has room again."
    )
    link_dwell_s: float = Field(default=10.0, ge=0, description="cache_scope auto: seconds between two changes.")
    fallback_to_local_prefill: bool = Field(
        default=True, description="Prefill near when far prefill cannot be had or fails; otherwise 503."
    )
    allow_placement_override: bool = Field(
        default=False,
        description="Let clients force a placement with the x-farfill-force-placement header (parity, tests).",
    )
    circuit_breaker: CircuitBreakerConfig = CircuitBreakerConfig()
    placement: PlacementConfig = PlacementConfig()
    fallback_budget: FallbackBudgetConfig = FallbackBudgetConfig()
    rollout: RolloutConfig = RolloutConfig()
