"""Metrics of the registry. Only here a dead worker still counts: its own series vanish with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from farfill.core.cluster import Instance, InstanceState
from farfill.telemetry.metrics.families import CERTIFICATE_CHANGES, CERTIFICATE_OUTCOMES, MetricSet


class RegistryMetrics:
    """`site` and `role` of `farfill_workers` are the worker's; of all others the registry's."""

    def __init__(self, *, site: str, workers: Iterable[tuple[str, str]]) -> None:
        """`workers` are the (site, role) pairs of the cluster file: those that must be there."""
        metrics = MetricSet()
        self.registry = metrics.registry
        self._expected = set(workers)
        self._workers = metrics.gauge(
            "farfill_workers", "Live workers by site, role and state.", site=(), role=(), state=()
        )
        own = {"site": (site,), "role": ("registry",)}
        self._own = {"site": site, "role": "registry"}
        self._revision = metrics.gauge("farfill_registry_revision", "Moves on with every change.", **own)
        self._watchers = metrics.gauge("farfill_registry_watchers", "Open long polls.", **own)
        self._expired = metrics.counter("farfill_lease_expirations", "Workers that stopped renewing.", **own)
        self._registrations = metrics.counter(
            "farfill_registrations",
            "Calls that write, by outcome.",
            **own,
            outcome=("registered", "renewed", "deregistered", "forbidden", "superseded", "store_unavailable"),
        )
        self._store_up = metrics.gauge("farfill_store_up", "1 while the store answers this registry.", **own)
        self._store_requests = metrics.counter(
            "farfill_store_requests", "Answers and failures of the store, by outcome.", **own, outcome=("ok",)
        )
        self._certificates = metrics.counter(
            "farfill_certificate_changes", CERTIFICATE_CHANGES, **own, outcome=CERTIFICATE_OUTCOMES
        )
        self.set_state((), 0)

    def set_state(self, instances: Iterable[Instance], revision: int) -> None:
        """All live workers."""
        count = Counter((i.site, str(i.role), i.state) for i in instances)
        self._expected |= {(site, role) for site, role, _ in count}
        for site, role in self._expected:
            for state in InstanceState:
                self._workers(site=site, role=role, state=str(state)).set(count[site, role, state])
        self._revision(**self._own).set(revision)

    def written(self, outcome: str) -> None:
        """A PUT or DELETE ended."""
        self._registrations(**self._own, outcome=outcome).inc()

    def registry_answered(self, outcome: str) -> None:
        """The store answered ("ok"), or did not, for a stable reason."""
        self._store_requests(**self._own, outcome=outcome).inc()
        self._store_up(**self._own).set(1 if outcome == "ok" else 0)

    def certificates_changed(self, outcome: str) -> None:
        """There were other certificate files: "replaced", "refused" or "unusable"."""
        self._certificates(**self._own, outcome=outcome).inc()

    def expired(self, count: int) -> None:
        """So many leases ran out."""
        self._expired(**self._own).inc(count)

    def watching(self, change: int) -> None:
        """A long poll began (+1) or ended (-1)."""
        self._watchers(**self._own).inc(change)
