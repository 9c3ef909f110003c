"""What the gateway tells about itself: the `GatewayObserver` that metrics implement, and one that is silent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from farfill.core.cluster import FallbackReason, Instance, PlacementReason
from farfill.policy.breaker import BreakerState

OutcomeName = Literal["ok", "client_error", "rejected", "error", "cancelled"]


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One API request that ended. Labels are safe for metrics: `model` is a served name or "other".

    `placement` is what really happened ("local" | "remote"), "none" when it never started. `reason` and
    `fallback` say why. `continued` are the reasons for which other prefill instances took over. `error_reason` is a
    stable reason, "" when ok. `stages_s` are seconds by pipeline step. Tokens are summed over prompts and choices;
    `ttft_s` and `tpot_s` are None without a first (second) token.
    """

    endpoint: Literal["chat", "completions"]
    model: str
    outcome: OutcomeName
    status: int
    error_reason: str = ""
    placement: Literal["local", "remote", "none"] = "none"
    reason: PlacementReason | None = None
    fallback: FallbackReason = FallbackReason.NONE
    continued: tuple[str, ...] = ()
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    duration_s: float
    stages_s: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])


class MediaObserver(Protocol):
    """Hears of the images of requests."""

    def media_loaded(self, source: str, nbytes: int) -> None:
        """An image file was read from "data" (a data URL) or "url" (fetched)."""
        ...

    def media_refused(self, reason: str) -> None:
        """A request was refused because of its images, for a reason of `media.MEDIA_REASONS`."""
        ...


class GatewayObserver(MediaObserver, Protocol):
    """Hears of every request. Called on the event loop; must be cheap and must not raise."""

    def request_accepted(self) -> None:
        """A generation request came in (in flight + 1)."""
        ...

    def request_finished(self, summary: RequestSummary) -> None:
        """It ended, however (in flight - 1). Called exactly once per `request_accepted`."""
        ...

    def token_gap(self, model: str, gap_s: float) -> None:
        """ITL: seconds between two consecutive token events of one generation."""
        ...

    def prefill_leg_ended(self, prefill: Instance, outcome: str, seconds: float, wire_bytes: int) -> None:
        """A far prefill ended; `outcome` is "ok", "cancelled" or a `FallbackReason` value."""
        ...

    def prefill_continued(self, reason: str, outcome: str) -> None:
        """A far prefill failed for `reason`; what came of letting another instance continue.

        `outcome`: "ok", "failed", "cancelled", "refused" by decode, "no_instance" when there was no other one,
        "exhausted" when `kv_transfer.continuations` were used up, "deadline" when the request's was too near.
        """
        ...

    def decode_retried(self, decode: Instance, reason: str) -> None:
        """A decode instance failed before its first token and another try was made."""
        ...

    def instance_died(self, instance: Instance, *, over: bool) -> None:
        """An instance died while it worked on a request; `over`: no other one gets that request."""
        ...

    def breaker_changed(self, prefill: Instance, state: BreakerState) -> None:
        """The breaker of a prefill instance is in `state` now."""
        ...


class PolicyObserver(Protocol):
    """Hears what the policies do. Called on the event loop; must be cheap and must not raise."""

    def prefix_hit(self, expected_tokens: int, actual_tokens: int, source: str) -> None:
        """A prompt was prefilled: the hit counted on, and the one there was. `source`: "exact" or "history"."""
        ...

    def block_events(self, kind: str, blocks: int) -> None:
        """A worker announced blocks: "snapshot", "stored", "removed" or "cleared"."""
        ...

    def block_gap(self, reason: str) -> None:
        """A worker's block events could not be followed on; see `gateway.blocks`."""
        ...

    def block_index(self, blocks: int, forgotten: int, exact: int) -> None:
        """Size of the prefix index, blocks its bound has cost, and instances that announce theirs."""
        ...

    def threshold_set(self, tokens: int, reason: str, model: str) -> None:
        """The threshold in force for `model`; `reason` why it was searched, "" at the start."""
        ...

    def fallback_asked(self, verdict: str, remaining_ratio: float) -> None:
        """A prompt that belongs far asked for local prefill: "granted", or why not; and what is left of the budget."""
        ...

    def admission(self, running: int, waiting: int, kv_tokens: int, link_bytes: int) -> None:
        """What admission counts now."""
        ...

    def admission_ended(self, outcome: str, waited_s: float) -> None:
        """A request may begin ("started"), was turned away (a `policy.admission.Refusal`), or left while it waited."""
        ...

    def decisions_dropped(self, count: int) -> None:
        """Lines that the decision log lost."""
        ...

    def recordings_dropped(self, count: int) -> None:
        """Lines that the recording lost."""
        ...

    def rollout_set(self, shares: Mapping[tuple[str, str], float]) -> None:
        """Percent by (model, tenant) as this gateway applies them."""
        ...

    def parity_sampled(self, outcome: str) -> None:
        """A prompt prefilled far was computed near as well: "equal", "differs" or "failed"."""
        ...

    def rollout_decided(self, action: str, reason: str) -> None:
        """A guard of an automatic rollout spoke."""
        ...

    def config_followed(self, version: int, outcome: str, needs_restart: int) -> None:
        """The registry has another configuration, which was "applied" or "refused"; keys that wait for a restart."""
        ...


class SilentPolicyObserver:
    """Tells nobody."""

    def prefix_hit(self, expected_tokens: int, actual_tokens: int, source: str) -> None: ...

    def block_events(self, kind: str, blocks: int) -> None: ...

    def block_gap(self, reason: str) -> None: ...

    def block_index(self, blocks: int, forgotten: int, exact: int) -> None: ...

    def threshold_set(self, tokens: int, reason: str, model: str) -> None: ...

    def fallback_asked(self, verdict: str, remaining_ratio: float) -> None: ...

    def admission(self, running: int, waiting: int, kv_tokens: int, link_bytes: int) -> None: ...

    def admission_ended(self, outcome: str, waited_s: float) -> None: ...

    def decisions_dropped(self, count: int) -> None: ...

    def recordings_dropped(self, count: int) -> None: ...

    def rollout_set(self, shares: Mapping[tuple[str, str], float]) -> None: ...

    def parity_sampled(self, outcome: str) -> None: ...

    def rollout_decided(self, action: str, reason: str) -> None: ...

    def config_followed(self, version: int, outcome: str, needs_restart: int) -> None: ...


class SilentObserver:
    """Tells nobody."""

    def request_accepted(self) -> None: ...

    def request_finished(self, summary: RequestSummary) -> None: ...

    def token_gap(self, model: str, gap_s: float) -> None: ...

    def prefill_leg_ended(self, prefill: Instance, outcome: str, seconds: float, wire_bytes: int) -> None: ...

    def prefill_continued(self, reason: str, outcome: str) -> None: ...

    def decode_retried(self, decode: Instance, reason: str) -> None: ...

    def instance_died(self, instance: Instance, *, over: bool) -> None: ...

    def breaker_changed(self, prefill: Instance, state: BreakerState) -> None: ...

    def media_loaded(self, source: str, nbytes: int) -> None: ...

    def media_refused(self, reason: str) -> None: ...
