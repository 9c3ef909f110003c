"""Metrics of `farfill autoscale`. Implements `farfill.scaling.loop.ScalingObserver` by shape."""

from __future__ import annotations

from farfill.telemetry.metrics.families import MetricSet

OUTCOMES = ("decided", "load_unknown")
REASONS = ("busy", "idle", "converted", "bounds")


class AutoscaleMetrics:
    """A set of its own: autoscale is one process."""

    def __init__(self) -> None:
        metrics = MetricSet(service="autoscale")
        self.registry = metrics.registry
        self._looks = metrics.counter(
            "farfill_autoscale_looks", "Looks at all groups: decided, or load_unknown.", outcome=OUTCOMES
        )
        self._changes = metrics.counter(
            "farfill_autoscale_changes",
            "Decisions that a group should have another number of instances.",
            site=(),
            role=(),
            reason=REASONS,
        )
        self._told = metrics.counter(
            "farfill_autoscale_told",
            "Sinks that were told of changes: ok, or failed.",
            sink=(),
            outcome=("ok", "failed"),
        )
        self._instances = metrics.gauge(
            "farfill_autoscale_instances", "Instances as seen at the last look, and as decided.",
            site=(), role=(), state=("ready", "starting", "wanted"),
        )  # fmt: skip
        self._busy = metrics.gauge(
            "farfill_autoscale_busy_instances", "Work being done, in instances that do nothing else.", site=(), role=()
        )
        self._waiting = metrics.gauge(
            "farfill_autoscale_waiting_seconds", "Work that waits, in seconds of one instance.", site=(), role=()
        )
        self._decided = metrics.gauge(
            "farfill_autoscale_last_decision_timestamp_seconds", "Unix time of the last look that was decided on."
        )

    def looked(self, outcome: str, unix_s: float) -> None:
        """A look at all groups ended."""
        self._looks(outcome=outcome).inc()
        if outcome == "decided":
            self._decided().set(unix_s)

    def group(self, site: str, role: str, *, ready: int, starting: int, busy: float, waiting_s: float) -> None:
        """What was seen of a group; what is wanted stays unless a change follows."""
        self._instances(site=site, role=role, state="ready").set(ready)
        self._instances(site=site, role=role, state="starting").set(starting)
        self._instances(site=site, role=role, state="wanted").set(ready + starting)
        self._busy(site=site, role=role).set(busy)
        self._waiting(site=site, role=role).set(waiting_s)

    def changed(self, site: str, role: str, *, after: int, reason: str) -> None:
        """A group should have `after` instances."""
        self._changes(site=site, role=role, reason=reason).inc()
        self._instances(site=site, role=role, state="wanted").set(after)

    def told(self, sink: str, *, ok: bool) -> None:
        """A sink was told of changes, or could not be."""
        self._told(sink=sink, outcome="ok" if ok else "failed").inc()
