"""Metrics count what happened, exist before anything happened, and follow the naming rules."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from farfill.core.cluster import FallbackReason, Instance, InstanceState, PlacementReason, Role
from farfill.engine.protocol import EngineLoad, EngineTotals, RankLoads
from farfill.gateway.observe import GatewayObserver, RequestSummary
from farfill.policy.breaker import BreakerState
from farfill.telemetry.loop_lag import watch_loop_lag
from farfill.telemetry.metrics import GatewayMetrics, RegistryMetrics, WorkerMetrics, exposition
from farfill.telemetry.metrics.access import OUTCOMES as ACCESS_OUTCOMES
from farfill.telemetry.metrics.processes import ProcessMetrics

FAR = Instance(
    name="p1",
    role=Role.PREFILL,
    site="far",
    url="https://127.0.0.1:1",
    transfer_address="",
    model="tiny",
    fingerprint="f",
    generation="g",
    state=InstanceState.READY,
    max_context_tokens=100,
)


def gateway() -> GatewayMetrics:
    return GatewayMetrics(site="near", model="tiny")


def worker() -> WorkerMetrics:
    return WorkerMetrics(site="near", role="decode", model="tiny")


def registry() -> RegistryMetrics:
    return RegistryMetrics(site="near", workers=[("near", "decode"), ("far", "prefill")])


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@pytest.mark.parametrize("build", [gateway, worker, registry])
def test_names_units_and_labels_follow_the_rules(build):
    families = [f for f in build().registry.collect() if not f.name.startswith("process_")]
    assert families
    for family in families:
        assert family.name.startswith("farfill_")
        assert not family.name.endswith(("_ms", "_milliseconds", "_mb"))
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert "instance" not in sample.labels


@pytest.mark.parametrize(
    ("build", "section"),
    [
        (gateway, "Gateway"),
        (worker, "Workers"),
        (registry, "Registry"),
        (lambda: ProcessMetrics(site="near"), "Gateway"),
    ],
)
def test_every_metric_is_documented_at_its_role(build, section: str):
    """Two roles may have different metrics of one name, so the right table counts."""
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    table = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
    for family in build().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.startswith("process_"):
            assert f"| `{name}` | {family.type} |" in table, f"{name} is missing in docs/metrics.md, {section}"


def test_exposition_is_readable_by_prometheus():
    metrics = worker()
    metrics.fallback("checksum")
    body, content_type = exposition(metrics.registry)
    assert content_type.startswith("text/plain")
    samples = [s for f in text_string_to_metric_families(body.decode()) for s in f.samples]
    assert any(s.name == "farfill_worker_fallbacks_total" and s.labels["reason"] == "checksum" for s in samples)


def test_first_event_is_visible_as_an_increase():
    labels = {"site": "near", "role": "decode", "model": "tiny"}
    metrics = worker()
    assert value(metrics.registry, "farfill_worker_fallbacks_total", **labels, reason="link_lost") == 0
    assert value(metrics.registry, "farfill_transfers_total", **labels, outcome="failed", reason="checksum") == 0
    near = {"site": "near", "role": "gateway"}
    assert value(gateway().registry, "farfill_fallbacks_total", **near, reason="prefill_lost") == 0
    assert value(gateway().registry, "farfill_requests_in_flight", **near) == 0


def test_gateway_counts_a_request_that_fell_back():
    metrics = gateway()
    observer: GatewayObserver = metrics  # the shape the gateway needs, checked by pyright
    observer.request_accepted()
    observer.token_gap("tiny", 0.02)
    observer.request_finished(
        RequestSummary(
            endpoint="chat", model="tiny", outcome="ok", status=200, placement="local", duration_s=2.0,
            reason=PlacementReason.ABOVE_THRESHOLD, fallback=FallbackReason.CHECKSUM, prompt_tokens=100,
            cached_tokens=40, completion_tokens=7, ttft_s=1.2, tpot_s=0.03, stages_s={"place": 0.001},
        )
    )  # fmt: skip
    own = {"site": "near", "role": "gateway"}
    tiny = {**own, "model": "tiny"}
    read = metrics.registry
    assert value(read, "farfill_requests_in_flight", **own) == 0
    assert value(read, "farfill_offload_eligible_total", **own) == 1
    assert value(read, "farfill_fallbacks_total", **own, reason="checksum") == 1
    assert value(read, "farfill_tokens_total", **tiny, kind="cached") == 40
    assert value(read, "farfill_ttft_seconds_sum", **tiny, placement="local") == 1.2
    assert value(read, "farfill_itl_seconds_count", **tiny) == 1
    assert value(read, "farfill_stage_seconds_count", **own, stage="place") == 1
    outcome = {"outcome": "ok", "placement": "local", "reason": "above_threshold"}
    assert value(read, "farfill_requests_total", **tiny, **outcome) == 1


def test_gateway_tells_errors_and_short_requests_apart():
    metrics = gateway()
    metrics.request_accepted()
    metrics.request_finished(
        RequestSummary(
            endpoint="chat", model="other", outcome="rejected", status=503, error_reason="unavailable", duration_s=0.1
        )
    )
    own = {"site": "near", "role": "gateway"}
    assert value(metrics.registry, "farfill_request_errors_total", **own, reason="unavailable") == 1
    assert value(metrics.registry, "farfill_offload_eligible_total", **own) == 0


def test_link_metrics_carry_both_sites():
    metrics = gateway()
    metrics.prefill_leg_ended(FAR, "ok", 1.5, 1000)
    metrics.breaker_changed(FAR, BreakerState.OPEN)
    link = {"site": "near", "role": "gateway", "src_site": "far", "dst_site": "near"}
    assert value(metrics.registry, "farfill_remote_wire_bytes_total", **link) == 1000
    assert value(metrics.registry, "farfill_breaker_open", **link) == 1
    metrics.breaker_changed(FAR, BreakerState.CLOSED)
    assert value(metrics.registry, "farfill_breaker_open", **link) == 0


def test_known_workers_go_to_zero_when_they_leave():
    metrics = gateway()
    labels = {"site": "near", "role": "gateway", "worker_site": "far", "worker_role": "prefill", "state": "ready"}
    metrics.instances_known([FAR])
    assert value(metrics.registry, "farfill_known_workers", **labels) == 1
    metrics.instances_known([])
    assert value(metrics.registry, "farfill_known_workers", **labels) == 0


def test_worker_load_and_transfers():
    metrics = worker()
    metrics.set_load(
        EngineLoad(queued_tokens=5, running_sequences=2, waiting_sequences=1, kv_used_bytes=64, prefix_cache_bytes=32)
    )
    metrics.set_held_transfers(3)
    metrics.prefill_finished(0.5, 100, 28)
    metrics.transfer_finished("ok", "none", 0.4, 2000, 1000)
    labels = {"site": "near", "role": "decode", "model": "tiny"}
    read = metrics.registry
    assert value(read, "farfill_queue_tokens", **labels) == 5
    assert value(read, "farfill_held_transfers", **labels) == 3
    assert value(read, "farfill_prefill_tokens_total", **labels, source="cached") == 28
    assert value(read, "farfill_transfer_wire_bytes_total", **labels) == 1000
    assert value(read, "farfill_transfers_total", **labels, outcome="ok", reason="none") == 1


def test_engine_totals_are_counted_by_their_growth():
    metrics = worker()
    idle = EngineLoad(queued_tokens=0, running_sequences=0, waiting_sequences=0, kv_used_bytes=0, prefix_cache_bytes=0)
    metrics.set_load(idle)
    for hits in (3, 3, 5):
        totals = EngineTotals(prefix_hits=hits, set_back_growth=1)
        metrics.set_load(replace(idle, kv_used_bytes=100, kv_filled_bytes=75, kv_most_bytes=120, totals=totals))
    labels = {"site": "near", "role": "decode", "model": "tiny"}
    read = metrics.registry
    assert value(read, "farfill_prefix_lookups_total", **labels, outcome="hit") == 5
    assert value(read, "farfill_set_back_total", **labels, reason="growth") == 1
    assert value(read, "farfill_set_back_total", **labels, reason="priority") == 0
    assert value(read, "farfill_kv_high_water_bytes", **labels) == 120
    assert value(read, "farfill_kv_fragmentation_ratio", **labels) == 0.25


def test_registry_shows_missing_workers_as_zero():
    metrics = registry()
    labels = {"site": "far", "role": "prefill", "state": "ready"}
    assert value(metrics.registry, "farfill_workers", **labels) == 0
    metrics.set_state([FAR], 4)
    assert value(metrics.registry, "farfill_workers", **labels) == 1
    assert value(metrics.registry, "farfill_registry_revision", site="near", role="registry") == 4


async def test_loop_lag_is_observed():
    seen: list[float] = []
    enough = asyncio.Event()

    def observe(lag_s: float) -> None:
        seen.append(lag_s)
        if len(seen) == 3:
            enough.set()

    task = asyncio.create_task(watch_loop_lag(observe, 0.001))
    await asyncio.wait_for(enough.wait(), 5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert all(lag >= 0 for lag in seen)


def test_ranks_and_experts_are_counted_by_their_growth():
    metrics = worker()
    idle = EngineLoad(queued_tokens=0, running_sequences=0, waiting_sequences=0, kv_used_bytes=0, prefix_cache_bytes=0)
    metrics.set_load(replace(idle, ranks=RankLoads(step_s=(2.0, 4.0), exchange_s=(1.0, 1.0), expert_tokens=())))
    loads = RankLoads(step_s=(3.0, 8.0), exchange_s=(1.5, 3.0), expert_tokens=(6, 2))
    for _ in range(2):
        metrics.set_load(replace(idle, ranks=loads))
    labels = {"site": "near", "role": "decode", "model": "tiny"}
    read = metrics.registry
    assert value(read, "farfill_rank_seconds_total", **labels, rank="0", kind="compute") == 1.5
    assert value(read, "farfill_rank_seconds_total", **labels, rank="1", kind="exchange") == 3.0
    assert value(read, "farfill_expert_tokens_total", **labels, expert="0") == 6
    # Of the latest steps only: 0.5 and 2 seconds, 6 and 2 tokens.
    assert value(read, "farfill_rank_imbalance_ratio", **labels) == 1.6
    assert value(read, "farfill_expert_imbalance_ratio", **labels) == 1.5


def test_every_reason_to_refuse_access_exists_from_the_start():
    sources = Path(__file__).parents[3] / "src" / "farfill" / "gateway"
    causes = {c for path in sources.glob("access*.py") for c in re.findall(r'cause="(\w+)"', path.read_text())}
    assert {"missing", "jwt_expired", "key_source"} <= causes <= set(ACCESS_OUTCOMES)
