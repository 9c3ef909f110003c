"""Metrics of a prefill, decode or mixed worker. Implements `farfill.transfer.observer.TransferObserver` by shape."""

from __future__ import annotations

from farfill.core.cluster import FallbackReason
from farfill.core.layout import TensorKind
from farfill.telemetry.metrics.engine import EngineMetrics, Load
from farfill.telemetry.metrics.families import (
    CERTIFICATE_CHANGES,
    CERTIFICATE_OUTCOMES,
    TRANSFER_BUCKETS_S,
    TTFT_BUCKETS_S,
    MetricSet,
)

LOSSY = ("int8", "fp8")
CODECS = ("none", "lz4", "zstd", *LOSSY)
KINDS = tuple(str(kind) for kind in TensorKind)
FALLBACKS = tuple(str(reason) for reason in FallbackReason if reason is not FallbackReason.NONE)


class WorkerMetrics:
    """Labels `site`, `role` and `model` are the worker's own."""

    def __init__(self, *, site: str, role: str, model: str) -> None:
        metrics = MetricSet(site=site, role=role, model=model)
        self.registry = metrics.registry
        self._declare_load(metrics)
        self._declare_work(metrics)
        self._declare_transfers(metrics)
        self._declare_wire(metrics)

    def _declare_load(self, metrics: MetricSet) -> None:
        self._engine = EngineMetrics(metrics)
        self._kv_total = metrics.gauge("farfill_kv_total_bytes", "KV memory this worker may use.")()
        self._held = metrics.gauge("farfill_held_transfers", "Transfers that hold KV memory; 0 when idle.")()
        self._registry_up = metrics.gauge("farfill_registry_up", "1 while the registry answers this process.")()
        self._registry_requests = metrics.counter(
            "farfill_registry_requests", "Calls to the registry, by outcome.", outcome=("ok",)
        )

        self._certificates = metrics.counter(
            "farfill_certificate_changes", CERTIFICATE_CHANGES, outcome=CERTIFICATE_OUTCOMES
        )

    def _declare_work(self, metrics: MetricSet) -> None:
        self._requests = metrics.counter(
            "farfill_worker_requests", "Requests this worker served, by outcome.", outcome=("ok", "cancelled")
        )
        self._prefill_seconds = metrics.histogram(
            "farfill_prefill_seconds", "Compute time of one prompt.", TTFT_BUCKETS_S
        )()
        self._prefill_tokens = metrics.counter(
            "farfill_prefill_tokens",
            "Prompt tokens by source: computed here, or had from a prefix hit (cached).",
            source=("computed", "cached"),
        )
        self._fallbacks = metrics.counter(
            "farfill_worker_fallbacks", "Prompts placed far that were prefilled here, by reason.", reason=FALLBACKS
        )
        self._lossy_requests = metrics.counter(
            "farfill_lossy_requests", "Requests answered from KV that may have travelled lossy, by form.", form=LOSSY
        )

    def _declare_transfers(self, metrics: MetricSet) -> None:
        self._transfers = metrics.counter(
            "farfill_transfers", "KV transfers that ended, by outcome and reason.", outcome=(), reason=()
        )
        self._transfers(outcome="ok", reason="none")
        for reason in FALLBACKS:
            self._transfers(outcome="failed", reason=reason)
            self._transfers(outcome="continued", reason=reason)
        self._transfer_seconds = metrics.histogram(
            "farfill_transfer_seconds", "Whole KV transfers, hidden parts included.", TRANSFER_BUCKETS_S
        )()
        self._raw_bytes = metrics.counter(
            "farfill_transfer_raw_bytes", "KV bytes of ended transfers before compression."
        )()
        self._wire_bytes = metrics.counter("farfill_transfer_wire_bytes", "KV bytes of ended transfers as sent.")()
        self._reused_bytes = metrics.counter(
            "farfill_reused_bytes", "KV bytes of a failed sender that the next one did not have to bring."
        )()

    def _declare_wire(self, metrics: MetricSet) -> None:
        directions = ("sent", "received")
        self._chunks = metrics.counter(
            "farfill_chunks", "Chunks on the wire, repeated ones included.", direction=directions, codec=CODECS
        )
        self._chunk_raw = metrics.counter(
            "farfill_chunk_raw_bytes",
            "Their bytes before compression, by kind of cache tensor.",
            direction=directions,
            codec=CODECS,
            kind=KINDS,
        )
        self._chunk_wire = metrics.counter(
            "farfill_chunk_wire_bytes", "Their bytes on the wire.", direction=directions, codec=CODECS, kind=KINDS
        )
        self._resent = metrics.counter(
            "farfill_chunks_resent",
            "Chunks that had to travel again.",
            reason=("checksum", "connection_lost", "overdue"),
        )
        self._dropped = metrics.counter("farfill_chunks_dropped", "Chunks that nobody needed any more.", reason=())
        self._refused = metrics.counter(
            "farfill_transfers_refused", "Connections and transfers refused, by either side.", reason=()
        )
        # `peer` is a worker's name in the cluster file: as many values as there are workers.
        self._connections = metrics.gauge("farfill_connections", "KV connections to another worker.", peer=())
        self._link_rate = metrics.gauge("farfill_link_bytes_per_second", "Estimated rate of a link.", peer=())
        self._link_rtt = metrics.gauge("farfill_link_rtt_seconds", "Estimated round trip of a link.", peer=())

        self._tcp_rtt = metrics.gauge(
            "farfill_tcp_rtt_seconds", "Smoothed round trip of TCP, queues included.", peer=()
        )
        self._tcp_delivery = metrics.gauge(
            "farfill_tcp_delivery_bytes_per_second", "Latest delivery rate of TCP, all connections.", peer=()
        )
        self._tcp_sent = metrics.counter(
            "farfill_tcp_segments_sent", "Segments TCP sent, those again included.", peer=()
        )
        self._tcp_resent = metrics.counter("farfill_tcp_segments_resent", "Segments TCP sent again.", peer=())

    def set_capacity(self, kv_total_bytes: int) -> None:
        """KV memory this worker may use."""
        self._kv_total.set(kv_total_bytes)

    def set_load(self, load: Load) -> None:
        """How busy the engine is."""
        self._engine.set_load(load)

    def set_held_transfers(self, count: int) -> None:
        """The leak counter."""
        self._held.set(count)

    def prefill_finished(self, seconds: float, computed_tokens: int, cached_tokens: int) -> None:
        """A prompt was prefilled here."""
        self._prefill_seconds.observe(seconds)
        self._prefill_tokens(source="computed").inc(computed_tokens)
        self._prefill_tokens(source="cached").inc(cached_tokens)

    def transfer_finished(self, outcome: str, reason: str, seconds: float, raw_bytes: int, wire_bytes: int) -> None:
        """A KV transfer ended; `outcome` is "ok", "failed" or "continued" (by another sender), `reason` why."""
        self._transfers(outcome=outcome, reason=reason).inc()
        self._transfer_seconds.observe(seconds)
        self._raw_bytes.inc(raw_bytes)
        self._wire_bytes.inc(wire_bytes)

    def bytes_reused(self, nbytes: int) -> None:
        """A sender took over, and did not have to bring these."""
        self._reused_bytes.inc(nbytes)

    def request_finished(self, outcome: str) -> None:
        """A request of the gateway ended: "ok", "cancelled" or a stable reason."""
        self._requests(outcome=outcome).inc()

    def lossy_request(self, form: str) -> None:
        """An answer rests on KV that may have travelled lossy."""
        self._lossy_requests(form=form).inc()

    def fallback(self, reason: str) -> None:
        """A prompt placed far is prefilled here."""
        self._fallbacks(reason=reason).inc()

    def chunk_sent(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        """A chunk left."""
        self._count_chunk("sent", raw_bytes, wire_bytes, codec, kind)

    def chunk_confirmed(self, connection: int, wire_bytes: int) -> None:
        """The receiver has it. Not counted: it is what was sent without what was resent."""

    def chunk_received(self, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        """A chunk arrived."""
        self._count_chunk("received", raw_bytes, wire_bytes, codec, kind)

    def resent(self, reason: str) -> None:
        """A chunk must travel again."""
        self._resent(reason=reason).inc()

    def dropped(self, reason: str) -> None:
        """A chunk arrived that nobody needs (any more)."""
        self._dropped(reason=reason).inc()

    def refused(self, reason: str) -> None:
        """A connection or a transfer was refused."""
        self._refused(reason=reason).inc()

    def connections(self, peer: str, count: int) -> None:
        """So many connections to `peer` stand now."""
        self._connections(peer=peer).set(count)

    def link(self, peer: str, rate_bytes_per_s: float | None, rtt_s: float | None) -> None:
        """The estimates of the link to `peer` changed; None: not known."""
        if rate_bytes_per_s is not None:
            self._link_rate(peer=peer).set(rate_bytes_per_s)
        if rtt_s is not None:
            self._link_rtt(peer=peer).set(rtt_s)

    def path(
        self, peer: str, rtt_s: float, segments_sent: int, segments_resent: int, delivery_bytes_per_s: float
    ) -> None:
        """What TCP measured on all connections to `peer`; segments since the last call, all and sent again."""
        self._tcp_rtt(peer=peer).set(rtt_s)
        self._tcp_delivery(peer=peer).set(delivery_bytes_per_s)
        self._tcp_sent(peer=peer).inc(segments_sent)
        self._tcp_resent(peer=peer).inc(segments_resent)

    def _count_chunk(self, direction: str, raw_bytes: int, wire_bytes: int, codec: str, kind: str) -> None:
        self._chunks(direction=direction, codec=codec).inc()
        self._chunk_raw(direction=direction, codec=codec, kind=kind).inc(raw_bytes)
        self._chunk_wire(direction=direction, codec=codec, kind=kind).inc(wire_bytes)

    def registry_answered(self, outcome: str) -> None:
        """A call to the registry ended: "ok" or a stable reason."""
        self._registry_requests(outcome=outcome).inc()
        self._registry_up.set(1 if outcome == "ok" else 0)

    def certificates_changed(self, outcome: str) -> None:
        """There were other certificate files: "replaced", "refused" or "unusable"."""
        self._certificates(outcome=outcome).inc()
