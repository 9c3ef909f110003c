"""Metrics of a gateway. Implements `farfill.gateway.observe.GatewayObserver` by shape."""

from __future__ import annotations

import itertools
from collections import Counter as CountOf
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from prometheus_client import Counter

from farfill.core.cluster import FallbackReason, Instance, InstanceState, PlacementReason, Role
from farfill.telemetry.metrics.access import AccessMetrics
from farfill.telemetry.metrics.families import (
    CERTIFICATE_CHANGES,
    CERTIFICATE_OUTCOMES,
    ITL_BUCKETS_S,
    LAG_BUCKETS_S,
    STAGE_BUCKETS_S,
    TRANSFER_BUCKETS_S,
    TTFT_BUCKETS_S,
    MetricSet,
    Tally,
)
from farfill.telemetry.metrics.policies import PolicyMetrics

TOKEN_KINDS = ("prompt", "cached", "completion")
OUTCOMES = ("ok", "client_error", "rejected", "error", "cancelled")
FALLBACKS = tuple(str(reason) for reason in FallbackReason if reason is not FallbackReason.NONE)
_REMOTE_REASONS = (PlacementReason.ABOVE_THRESHOLD, PlacementReason.FORCED_REMOTE, PlacementReason.FAR_CACHE)
# Long enough for far prefill, whether or not it could be had.
_ELIGIBLE_REASONS = frozenset(
    {
        *_REMOTE_REASONS,
        PlacementReason.NO_PREFILL_INSTANCE,
        PlacementReason.FINGERPRINT_MISMATCH,
        PlacementReason.BREAKER_OPEN,
        PlacementReason.LINK_BUSY,
        PlacementReason.PREFILL_OVERLOADED,
    }
)


class FinishedRequest(Protocol):
    """What is read of a `gateway.observe.RequestSummary`."""

    @property
    def model(self) -> str: ...
    @property
    def outcome(self) -> str: ...
    @property
    def error_reason(self) -> str: ...
    @property
    def placement(self) -> str: ...
    @property
    def reason(self) -> PlacementReason | None: ...
    @property
    def fallback(self) -> FallbackReason: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def stages_s(self) -> Mapping[str, float]: ...


class _Counts(NamedTuple):
    """Children that requests of the same labels share; `tokens` in the order of `TOKEN_KINDS`."""

    requests: Counter
    duration: Tally
    tokens: tuple[Counter, ...]


class GatewayMetrics:
    """Labels: `site` and `role` are the gateway's, `model` is a served name or "other"."""

    def __init__(self, *, site: str, model: str, also: Sequence[str] = ()) -> None:
        metrics = MetricSet(site=site, role="gateway")
        self.registry = metrics.registry
        self._site = site
        self._open_breakers: dict[str, set[str]] = {}
        self._sites_seen: set[str] = set()
        models = (model, *also)
        self._requests = metrics.counter(
            "farfill_requests",
            "API requests that ended, by outcome, where the prompt was prefilled, and why there.",
            model=(),
            outcome=(),
            placement=(),
            reason=(),
        )
        for name, outcome in itertools.product(models, OUTCOMES):
            for placement, reason in _placements():
                self._requests(model=name, outcome=outcome, placement=placement, reason=reason)
        self._errors = metrics.counter(
            "farfill_request_errors", "API requests that failed, by stable reason.", reason=()
        )
        self._running = 0
        in_flight = metrics.gauge("farfill_requests_in_flight", "API requests in progress.")
        in_flight().set_function(lambda: float(self._running))
        # What is looked up for every request and token, by labels: as many entries as children.
        self._counts: dict[tuple[str, str, str, PlacementReason | None], _Counts] = {}
        self._stage: dict[str, Tally] = {}
        self._gaps: dict[str, Tally] = {}
        self._eligible = metrics.counter(
            "farfill_offload_eligible", "Requests long enough for far prefill, whether or not it could be had."
        )
        self._fallbacks = metrics.counter(
            "farfill_fallbacks", "Requests placed far that decode prefilled itself, by reason.", reason=FALLBACKS
        )
        self._tokens = metrics.counter(
            "farfill_tokens",
            "Tokens: prompt, of these from a prefix hit (cached), and generated (completion).",
            model=models,
            kind=TOKEN_KINDS,
        )
        self._declare_latencies(metrics, models)
        self._declare_media(metrics)
        self._declare_far_side(metrics)
        self.policies = PolicyMetrics(metrics)
        self.access = AccessMetrics(metrics)

    def _declare_latencies(self, metrics: MetricSet, models: Iterable[str]) -> None:
        placements = ("local", "remote")
        self._ttft = metrics.tally(
            "farfill_ttft_seconds",
            "Request accepted to first token sent.",
            TTFT_BUCKETS_S,
            model=models,
            placement=placements,
        )
        self._tpot = metrics.tally(
            "farfill_tpot_seconds",
            "(Last - first token) / (n - 1), per request.",
            ITL_BUCKETS_S,
            model=models,
            placement=placements,
        )
        self._itl = metrics.tally("farfill_itl_seconds", "Each gap between token events.", ITL_BUCKETS_S, model=models)
        self._duration = metrics.tally("farfill_request_seconds", "Whole requests.", TTFT_BUCKETS_S, outcome=OUTCOMES)
        self._stages = metrics.tally(
            "farfill_stage_seconds", "Steps of the request pipeline.", STAGE_BUCKETS_S, stage=()
        )
        self._lag = metrics.histogram(
            "farfill_event_loop_lag_seconds", "How late the event loop woke a timer.", LAG_BUCKETS_S
        )

    def _declare_media(self, metrics: MetricSet) -> None:
        self._media = metrics.counter(
            "farfill_media", "Images of requests, by where they came from.", source=("data", "url")
        )
        self._media_bytes = metrics.counter("farfill_media_bytes", "Bytes of their files.", source=("data", "url"))
        self._media_refused = metrics.counter(
            "farfill_media_refused", "Requests refused because of their images.", reason=()
        )

    def _declare_far_side(self, metrics: MetricSet) -> None:
        self._far = metrics.counter(
            "farfill_remote_prefills", "Far prefills that ended, by link.", src_site=(), dst_site=(), outcome=()
        )
        self._far_seconds = metrics.histogram(
            "farfill_remote_prefill_seconds",
            "Far prefill with its transfer, as the gateway sees it.",
            TRANSFER_BUCKETS_S,
            src_site=(),
            dst_site=(),
        )
        self._far_bytes = metrics.counter(
            "farfill_remote_wire_bytes", "KV bytes that far prefill sent over the link.", src_site=(), dst_site=()
        )
        self._continuations = metrics.counter(
            "farfill_continuations",
            "Far prefills that failed before decode had everything, by reason, and what came of letting another"
            " prefill instance continue.",
            reason=FALLBACKS,
            outcome=("ok", "failed"),
        )
        self._deaths = metrics.counter(
            "farfill_request_deaths",
            "Workers that died while they worked on a request, and what came of it.",
            worker_role=("prefill", "decode", "mixed"),
            verdict=("tried_again", "ended"),
        )
        self._retries = metrics.counter(
            "farfill_decode_retries", "Decode instances that failed before the first token.", reason=()
        )
        self._breaker = metrics.gauge(
            "farfill_breaker_open",
            "1 while the breaker of any prefill instance of the link is not closed.",
            src_site=(),
            dst_site=(),
        )
        self._known = metrics.gauge(
            "farfill_known_workers",
            "Workers this gateway knows of.",
            worker_site=(),
            worker_role=(),
            state=(),
        )
        self._registry_up = metrics.gauge("farfill_registry_up", "1 while the registry answers this process.")
        self._registry_requests = metrics.counter(
            "farfill_registry_requests", "Calls to the registry, by outcome.", outcome=("ok",)
        )
        self._certificates = metrics.counter(
            "farfill_certificate_changes", CERTIFICATE_CHANGES, outcome=CERTIFICATE_OUTCOMES
        )
        self._expires = metrics.gauge(
            "farfill_public_certificate_expiry_timestamp_seconds",
            "When the certificate of gateway.tls_cert expires, in Unix time.",
        )
        for child in (self._eligible, self._lag, self._registry_up):
            child()

    def request_accepted(self) -> None:
        """In flight + 1."""
        self._running += 1

    def request_finished(self, summary: FinishedRequest) -> None:
        """In flight - 1, and all that is known of the request."""
        self._running -= 1
        key = summary.model, summary.outcome, summary.placement, summary.reason
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = self._counts_of(summary)
        counts.requests.inc()
        counts.duration.observe(summary.duration_s)
        if summary.error_reason:
            self._errors(reason=summary.error_reason).inc()
        if summary.reason in _ELIGIBLE_REASONS:
            self._eligible().inc()
        if summary.fallback is not FallbackReason.NONE:
            self._fallbacks(reason=str(summary.fallback)).inc()
        for counter, tokens in zip(
            counts.tokens, (summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens), strict=True
        ):
            if tokens:
                counter.inc(tokens)
        if summary.ttft_s is not None:
            self._ttft(model=summary.model, placement=summary.placement).observe(summary.ttft_s)
        if summary.tpot_s is not None:
            self._tpot(model=summary.model, placement=summary.placement).observe(summary.tpot_s)
        for stage, seconds in summary.stages_s.items():
            child = self._stage.get(stage)
            if child is None:
                child = self._stage[stage] = self._stages(stage=stage)
            child.observe(seconds)

    def _counts_of(self, summary: FinishedRequest) -> _Counts:
        reason = str(summary.reason) if summary.reason is not None else "none"
        return _Counts(
            self._requests(model=summary.model, outcome=summary.outcome, placement=summary.placement, reason=reason),
            self._duration(outcome=summary.outcome),
            tuple(self._tokens(model=summary.model, kind=kind) for kind in TOKEN_KINDS),
        )

    def token_gap(self, model: str, gap_s: float) -> None:
        """Seconds between two token events of one generation."""
        child = self._gaps.get(model)
        if child is None:
            child = self._gaps[model] = self._itl(model=model)
        child.observe(gap_s)

    def prefill_leg_ended(self, prefill: Instance, outcome: str, seconds: float, wire_bytes: int) -> None:
        """A far prefill ended as `outcome`: "ok", "cancelled" or a `FallbackReason`."""
        link = self._link(prefill)
        self._far(**link, outcome=outcome).inc()
        self._far_seconds(**link).observe(seconds)
        self._far_bytes(**link).inc(wire_bytes)

    def prefill_continued(self, reason: str, outcome: str) -> None:
        """A far prefill failed for `reason`, and another instance was to continue."""
        self._continuations(reason=reason, outcome=outcome).inc()

    def media_loaded(self, source: str, nbytes: int) -> None:
        """An image file came with a request ("data") or was fetched for it ("url")."""
        self._media(source=source).inc()
        self._media_bytes(source=source).inc(nbytes)

    def media_refused(self, reason: str) -> None:
        """A request was refused because of its images."""
        self._media_refused(reason=reason).inc()

    def instance_died(self, instance: Instance, *, over: bool) -> None:
        """An instance died while it worked on a request."""
        self._deaths(worker_role=str(instance.role), verdict="ended" if over else "tried_again").inc()

    def decode_retried(self, decode: Instance, reason: str) -> None:
        """`decode` failed before its first token and another try was made."""
        self._retries(reason=reason).inc()

    def breaker_changed(self, prefill: Instance, state: str) -> None:
        """The breaker of one prefill instance is "closed", "half_open" or "open" now."""
        open_here = self._open_breakers.setdefault(prefill.site, set())
        if state == "closed":
            open_here.discard(prefill.name)
        else:
            open_here.add(prefill.name)
        self._breaker(**self._link(prefill)).set(1 if open_here else 0)

    def instances_known(self, instances: Iterable[Instance]) -> None:
        """All workers the gateway knows of now; sites once seen go to 0, not away."""
        count = CountOf((i.site, i.role, i.state) for i in instances)
        self._sites_seen |= {site for site, _, _ in count}
        for site in self._sites_seen:
            for role in Role:
                for state in InstanceState:
                    child = self._known(worker_site=site, worker_role=str(role), state=str(state))
                    child.set(count[site, role, state])

    def loop_lag(self, seconds: float) -> None:
        """The event loop woke a timer this late."""
        self._lag().observe(seconds)

    def registry_answered(self, outcome: str) -> None:
        """A call to the registry ended: "ok" or a stable reason."""
        self._registry_requests(outcome=outcome).inc()
        self._registry_up().set(1 if outcome == "ok" else 0)

    def public_certificate(self, expires_unix_s: float) -> None:
        """The public certificate in use, or one of its chain, expires then."""
        self._expires().set(expires_unix_s)

    def certificates_changed(self, outcome: str) -> None:
        """There were other certificate files: "replaced", "refused" or "unusable"."""
        self._certificates(outcome=outcome).inc()

    def _link(self, prefill: Instance) -> dict[str, str]:
        return {"src_site": prefill.site, "dst_site": self._site}


def _placements() -> list[tuple[str, str]]:
    """Every (placement, reason) that may occur; local ones include fallbacks from far."""
    return [
        ("none", "none"),
        *(("local", str(reason)) for reason in PlacementReason),
        *(("remote", str(reason)) for reason in _REMOTE_REASONS),
    ]
