"""Metrics of a worker's engine, set from snapshots of its load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prometheus_client import Counter

from farfill.telemetry.metrics.families import MetricSet


class Totals(Protocol):
    """What is read of an `engine.protocol.EngineTotals`."""

    @property
    def decode_steps(self) -> int: ...
    @property
    def prefill_chunks(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    @property
    def prefix_misses(self) -> int: ...
    @property
    def hit_tokens(self) -> int: ...
    @property
    def miss_tokens(self) -> int: ...
    @property
    def set_back_growth(self) -> int: ...
    @property
    def set_back_priority(self) -> int: ...
    @property
    def prefix_dropped_room(self) -> int: ...
    @property
    def prefix_dropped_age(self) -> int: ...
    @property
    def prefix_pins_refused(self) -> int: ...
    @property
    def loads_refused(self) -> int: ...
    @property
    def loads_broken(self) -> int: ...


class Ranks(Protocol):
    """What is read of an `engine.protocol.RankLoads`."""

    @property
    def step_s(self) -> Sequence[float]: ...
    @property
    def exchange_s(self) -> Sequence[float]: ...
    @property
    def expert_tokens(self) -> Sequence[int]: ...


class Load(Protocol):
    """What is read of an `engine.protocol.EngineLoad`."""

    @property
    def queued_tokens(self) -> int: ...
    @property
    def running_sequences(self) -> int: ...
    @property
    def waiting_sequences(self) -> int: ...
    @property
    def kv_used_bytes(self) -> int: ...
    @property
    def kv_filled_bytes(self) -> int: ...
    @property
    def kv_most_bytes(self) -> int: ...
    @property
    def prefix_cache_bytes(self) -> int: ...
    @property
    def prefix_pinned_bytes(self) -> int: ...
    @property
    def totals(self) -> Totals: ...
    @property
    def ranks(self) -> Ranks | None: ...


class EngineMetrics:
    """Declares the engine's share of a worker's metrics. `set_load` counts by how much totals have grown."""

    def __init__(self, metrics: MetricSet) -> None:
        self._queue_tokens = metrics.gauge("farfill_queue_tokens", "Prompt tokens waiting to be prefilled.")()
        self._running = metrics.gauge("farfill_running_sequences", "Sequences being prefilled or decoded.")()
        self._waiting = metrics.gauge("farfill_waiting_sequences", "Sequences waiting for the engine.")()
        self._kv_used = metrics.gauge(
            "farfill_kv_used_bytes", "KV memory of running sequences; the prefix cache comes on top."
        )()
        self._kv_most = metrics.gauge("farfill_kv_high_water_bytes", "The most KV memory ever used at once.")()
        self._kv_unfilled = metrics.gauge(
            "farfill_kv_fragmentation_ratio", "Share of the used KV memory that is room for tokens to come."
        )()
        self._prefix_cache = metrics.gauge("farfill_prefix_cache_bytes", "KV memory kept for prefix hits.")()
        self._prefix_pinned = metrics.gauge(
            "farfill_prefix_pinned_bytes", "Of it, what an operator pinned; at most half of engine.prefix_cache_mb."
        )()
        refused = metrics.counter(
            "farfill_prefix_pins_refused", "Prefix snapshots that were to be pinned and are not: pins have a bound."
        )
        steps = metrics.counter(
            "farfill_engine_steps", "Decode steps, and prefill chunks computed.", kind=("decode", "prefill_chunk")
        )
        lookups = metrics.counter(
            "farfill_prefix_lookups",
            "Prompts by whether the prefix cache had their beginning.",
            outcome=("hit", "miss"),
        )
        tokens = metrics.counter(
            "farfill_prefix_tokens",
            "Prompt tokens not computed thanks to the prefix cache (hit), and computed (miss).",
            outcome=("hit", "miss"),
        )
        set_back = metrics.counter(
            "farfill_set_back",
            "Sequences whose KV was dropped to be computed again: for the growth of others, or for a request of higher"
            " priority.",
            reason=("growth", "priority"),
        )
        dropped = metrics.counter(
            "farfill_prefix_dropped",
            "Prefix snapshots dropped: for room, or because nobody used them in time.",
            reason=("room", "age"),
        )
        not_loaded = metrics.counter(
            "farfill_kv_loads_failed",
            "Prompts whose KV had arrived and was not used by the engine: refused, or broken while it was copied.",
            reason=("refused", "broken"),
        )
        self._ranks = _RankMetrics(metrics)
        self._totals: dict[str, tuple[Counter, int]] = {
            "decode_steps": (steps(kind="decode"), 0),
            "prefill_chunks": (steps(kind="prefill_chunk"), 0),
            "prefix_hits": (lookups(outcome="hit"), 0),
            "prefix_misses": (lookups(outcome="miss"), 0),
            "hit_tokens": (tokens(outcome="hit"), 0),
            "miss_tokens": (tokens(outcome="miss"), 0),
            "set_back_growth": (set_back(reason="growth"), 0),
            "set_back_priority": (set_back(reason="priority"), 0),
            "prefix_dropped_room": (dropped(reason="room"), 0),
            "prefix_dropped_age": (dropped(reason="age"), 0),
            "prefix_pins_refused": (refused(), 0),
            "loads_refused": (not_loaded(reason="refused"), 0),
            "loads_broken": (not_loaded(reason="broken"), 0),
        }

    def set_load(self, load: Load) -> None:
        """How busy the engine is, and what it has done so far."""
        self._queue_tokens.set(load.queued_tokens)
        self._running.set(load.running_sequences)
        self._waiting.set(load.waiting_sequences)
        self._kv_used.set(load.kv_used_bytes)
        self._kv_most.set(load.kv_most_bytes)
        self._kv_unfilled.set(1 - load.kv_filled_bytes / load.kv_used_bytes if load.kv_used_bytes else 0)
        self._prefix_cache.set(load.prefix_cache_bytes)
        self._prefix_pinned.set(load.prefix_pinned_bytes)
        if load.ranks is not None:
            self._ranks.set(load.ranks)
        for name, (counter, before) in self._totals.items():
            now = getattr(load.totals, name)
            counter.inc(now - before)
            self._totals[name] = counter, now


class _RankMetrics:
    """Of an engine in several processes. Labels are as many as ranks and experts."""

    def __init__(self, metrics: MetricSet) -> None:
        self._seconds = metrics.counter(
            "farfill_rank_seconds",
            "Time ranks of an engine spent in steps: computing, or exchanging results, which includes waiting.",
            rank=(),
            kind=(),
        )
        self._experts = metrics.counter(
            "farfill_expert_tokens", "Tokens sent to each expert, all layers together.", expert=()
        )
        self._rank_imbalance = metrics.gauge(
            "farfill_rank_imbalance_ratio", "Computing time of the slowest rank over the mean, of the latest steps."
        )()
        self._expert_imbalance = metrics.gauge(
            "farfill_expert_imbalance_ratio", "Tokens of the busiest expert over the mean, of the latest steps."
        )()
        self._before: dict[str, list[float]] = {}

    def set(self, ranks: Ranks) -> None:
        """What was done so far."""
        exchanging = self._growth("exchange", ranks.exchange_s)
        steps = self._growth("step", ranks.step_s)
        # What a rank exchanges outside of steps, as its model is checked, counts as exchange only.
        computing = [max(0.0, step - exchange) for step, exchange in zip(steps, exchanging, strict=True)]
        for kind, seconds in (("compute", computing), ("exchange", exchanging)):
            for rank, value in enumerate(seconds):
                self._seconds(rank=str(rank), kind=kind).inc(value)
        tokens = self._growth("expert", ranks.expert_tokens)
        for expert, count in enumerate(tokens):
            self._experts(expert=str(expert)).inc(count)
        for gauge, shares in ((self._rank_imbalance, computing), (self._expert_imbalance, tokens)):
            if sum(shares):
                gauge.set(max(shares) * len(shares) / sum(shares))

    def _growth(self, name: str, totals: Sequence[float]) -> list[float]:
        """By how much each of `totals` has grown since it was last looked at."""
        before = self._before.get(name, [])
        self._before[name] = list(totals)
        return [total - (before[i] if i < len(before) else 0.0) for i, total in enumerate(totals)]
