"""Metrics of the gateway's policies. Implements `farfill.gateway.observe.PolicyObserver` by shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from farfill.telemetry.metrics.families import TTFT_BUCKETS_S, MetricSet

VERDICTS = ("granted", "fallback_tokens", "fallback_concurrency", "fallback_itl_guard")
ADMISSIONS = (
    "started",
    "cancelled",
    "tenant_requests",
    "tenant_tokens",
    "tenant_queue_full",
    "queue_full",
    "too_large",
    "shed",
    "queue_deadline",
)
SEARCHES = ("queue_surge", "near_surge", "egress_pressure", "capacity", "relief", "new_lengths")
GAPS = ("lost", "sequence", "overrun", "refused", "generation", "not_told", "chunk_tokens", "protocol_violation")
ROLLOUT_ACTIONS = ("advance", "hold", "revert", "done")


class PolicyMetrics:
    """Declared on the gateway's own set."""

    def __init__(self, metrics: MetricSet) -> None:
        self._prefix_tokens = metrics.counter(
            "farfill_prefix_tokens",
            "Prompt tokens of prefix hits where prompts were prefilled: counted on when placed, and really found.",
            kind=("expected", "actual"),
        )
        self._prefix_error = metrics.counter(
            "farfill_prefix_error_tokens",
            "Prompt tokens by which prefix hits were counted on too high (over) or too low (under), by where the"
            " expectation came from.",
            source=("exact", "history"),
            direction=("over", "under"),
        )
        self._block_events = metrics.counter(
            "farfill_prefix_events", "Blocks in workers' block events.", kind=("snapshot", "stored", "removed")
        )
        self._block_cleared = metrics.counter("farfill_prefix_clears", "Workers' whole caches announced as cleared.")
        self._block_gaps = metrics.counter(
            "farfill_prefix_gaps",
            "Streams of block events that could not be followed on, by reason.",
            reason=GAPS,
        )
        self._index_blocks = metrics.gauge("farfill_prefix_index_blocks", "Blocks in the prefix index.")
        self._index_forgotten = metrics.gauge(
            "farfill_prefix_index_forgotten_blocks", "Blocks that the prefix index's bound has cost since the start."
        )
        self._index_exact = metrics.gauge(
            "farfill_prefix_exact_workers", "Workers whose block events are followed; of others history is believed."
        )
        for child in (self._block_cleared, self._index_blocks, self._index_forgotten, self._index_exact):
            child()
        self._threshold = metrics.gauge(
            "farfill_threshold_tokens", "Uncached tokens from which on prompts are prefilled far.", model=()
        )
        self._searches = metrics.counter(
            "farfill_threshold_searches", "Searches of the threshold, by what asked for them.", reason=SEARCHES
        )
        self._fallback = metrics.counter(
            "farfill_fallback_budget",
            "Prompts that belong far and asked for local prefill, by the budget's answer.",
            verdict=VERDICTS,
        )
        self._remaining = metrics.gauge(
            "farfill_fallback_budget_remaining_ratio", "What is left of the fallback budget, 0 to 1."
        )
        self._declare_admission(metrics)
        self._dropped = metrics.counter("farfill_decisions_dropped", "Lines the decision log could not keep.")
        self._unrecorded = metrics.counter("farfill_recordings_dropped", "Lines the recording could not keep.")
        self._percent = metrics.gauge(
            "farfill_rollout_percent", "Share of requests that may go far, as applied here.", model=(), tenant=()
        )
        self._steps = metrics.counter(
            "farfill_rollout_decisions",
            "What guards of automatic rollouts decided, and why.",
            action=ROLLOUT_ACTIONS,
            reason=(),
        )
        self._configs = metrics.counter(
            "farfill_config_changes",
            "Configurations of the registry that came into force, by what this gateway made of them.",
            outcome=("applied", "refused"),
        )
        self._config_version = metrics.gauge(
            "farfill_config_version", "Version of the registry's configuration followed here; 0: this gateway's file."
        )
        self._config_restart = metrics.gauge(
            "farfill_config_keys_waiting", "Keys of the configuration in force that this process needs a restart for."
        )
        self._config_version()
        self._config_restart()
        self._parity = metrics.counter(
            "farfill_parity_samples",
            "Prompts prefilled far that were computed near as well, by whether the tokens were the same.",
            outcome=("equal", "differs", "failed"),
        )
        self._shown: set[tuple[str, str]] = set()
        self._remaining().set(1)
        self._dropped()
        self._unrecorded()

    def _declare_admission(self, metrics: MetricSet) -> None:
        self._admissions = metrics.counter(
            "farfill_admissions", "Requests that came to admission, by how they left it.", outcome=ADMISSIONS
        )
        self._waits = metrics.histogram("farfill_admission_wait_seconds", "Wait for a turn.", TTFT_BUCKETS_S)
        self._running = metrics.gauge("farfill_admission_running", "Requests that have their turn.")
        self._waiting = metrics.gauge("farfill_admission_waiting", "Requests that wait for it.")
        self._kv_tokens = metrics.gauge(
            "farfill_admission_kv_tokens", "Prompt and longest output, in tokens, of requests that have their turn."
        )
        self._link_bytes = metrics.gauge(
            "farfill_admission_link_bytes", "KV these are to bring over links yet, by estimate."
        )
        self._counts = (0, 0, 0, 0)
        # Several times a request they change, and are read when somebody scrapes.
        for index, gauge in enumerate((self._running, self._waiting, self._kv_tokens, self._link_bytes)):
            gauge().set_function(partial(self._counted, index))
        self._started, self._waited = self._admissions(outcome="started"), self._waits()

    def prefix_hit(self, expected_tokens: int, actual_tokens: int, source: str) -> None:
        """A prompt was prefilled."""
        if expected_tokens:
            self._prefix_tokens(kind="expected").inc(expected_tokens)
        if actual_tokens:
            self._prefix_tokens(kind="actual").inc(actual_tokens)
        if expected_tokens != actual_tokens:
            direction = "over" if expected_tokens > actual_tokens else "under"
            self._prefix_error(source=source, direction=direction).inc(abs(expected_tokens - actual_tokens))

    def block_events(self, kind: str, blocks: int) -> None:
        """A worker announced blocks."""
        if kind == "cleared":
            self._block_cleared().inc()
        else:
            self._block_events(kind=kind).inc(blocks)

    def block_gap(self, reason: str) -> None:
        """A stream could not be followed on."""
        self._block_gaps(reason=reason).inc()

    def block_index(self, blocks: int, forgotten: int, exact: int) -> None:
        """The prefix index as it is."""
        self._index_blocks().set(blocks)
        self._index_forgotten().set(forgotten)
        self._index_exact().set(exact)

    def threshold_set(self, tokens: int, reason: str, model: str) -> None:
        """The threshold in force for `model`."""
        self._threshold(model=model).set(tokens)
        if reason:
            self._searches(reason=reason).inc()

    def fallback_asked(self, verdict: str, remaining_ratio: float) -> None:
        """A prompt that belongs far asked for local prefill."""
        self._fallback(verdict=verdict).inc()
        self._remaining().set(remaining_ratio)

    def admission(self, running: int, waiting: int, kv_tokens: int, link_bytes: int) -> None:
        """What admission counts now."""
        self._counts = (running, waiting, kv_tokens, link_bytes)

    def admission_ended(self, outcome: str, waited_s: float) -> None:
        """A request left admission."""
        child = self._started if outcome == "started" else self._admissions(outcome=outcome)
        child.inc()
        self._waited.observe(waited_s)

    def _counted(self, index: int) -> float:
        return float(self._counts[index])

    def decisions_dropped(self, count: int) -> None:
        """Lines that the decision log lost."""
        self._dropped().inc(count)

    def recordings_dropped(self, count: int) -> None:
        """Lines that the recording lost."""
        self._unrecorded().inc(count)

    def rollout_set(self, shares: Mapping[tuple[str, str], float]) -> None:
        """Percent by (model, tenant); one that is gone counts as 100."""
        self._shown |= set(shares)
        for model, tenant in self._shown:
            self._percent(model=model, tenant=tenant).set(shares.get((model, tenant), 100.0))

    def parity_sampled(self, outcome: str) -> None:
        """A prompt prefilled far was computed near as well."""
        self._parity(outcome=outcome).inc()

    def config_followed(self, version: int, outcome: str, needs_restart: int) -> None:
        """The registry has another configuration."""
        self._configs(outcome=outcome).inc()
        self._config_version().set(version)
        self._config_restart().set(needs_restart)

    def rollout_decided(self, action: str, reason: str) -> None:
        """A guard spoke."""
        self._steps(action=action, reason=reason).inc()
