"""Metrics of the process that keeps the processes of a gateway running (`farfill gateway --workers N`)."""

from __future__ import annotations

from farfill.telemetry.metrics.families import MetricSet


class ProcessMetrics:
    """On a registry of its own."""

    def __init__(self, *, site: str) -> None:
        metrics = MetricSet(site=site, role="gateway")
        self.registry = metrics.registry
        self._restarts = metrics.counter(
            "farfill_gateway_process_restarts",
            "Processes of the gateway that ended and were started again.",
            reason=("killed", "exited"),
        )

    def restarted(self, reason: str) -> None:
        """One was `killed` by a signal, or `exited` by itself."""
        self._restarts(reason=reason).inc()
