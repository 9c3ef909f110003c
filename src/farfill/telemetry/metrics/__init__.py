"""All metrics of Farfill, one class a role, each on a registry of its own. Listed in docs/metrics.md (tested)."""

from farfill.telemetry.metrics.families import exposition
from farfill.telemetry.metrics.gateway import GatewayMetrics
from farfill.telemetry.metrics.registry import RegistryMetrics
from farfill.telemetry.metrics.worker import WorkerMetrics

__all__ = ["GatewayMetrics", "RegistryMetrics", "WorkerMetrics", "exposition"]
