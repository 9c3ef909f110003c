"""How metrics are declared: a fixed set of labels per process, and children at 0 from the start.

A child that appears only with its first event is invisible to `increase()`. There is never a label `instance`
(Prometheus would rename it) nor one that clients can fill.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

TTFT_BUCKETS_S = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
ITL_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
TRANSFER_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
STAGE_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

CERTIFICATE_CHANGES = "New contents of certificate, key or CA files, by what came of them."
CERTIFICATE_OUTCOMES = ("replaced", "refused", "unusable")

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Family(Generic[Metric]):
    """One metric with the process's fixed labels filled in; call it with the remaining ones."""

    def __init__(self, metric: Metric, fixed: dict[str, str]) -> None:
        self._metric = metric
        self._fixed = fixed
        # The library's own look-up costs several times what counting does. As many entries as children.
        self._children: dict[tuple[tuple[str, str], ...], Metric] = {}

    def __call__(self, **labels: str) -> Metric:
        """The child for `labels`."""
        key = tuple(labels.items())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metric.labels(**self._fixed, **labels)
        return child


class Tally:
    """A histogram's child for a single thread, at a tenth of the cost of one that any thread may observe."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, not cumulative; the last one has no bound."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class TallyFamily(Collector):
    """A histogram of `Tally` children; call it with the labels that are not fixed."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], fixed: dict[str, str], names: Sequence[str]):
        self._name, self._text, self._fixed = name, text, tuple(fixed.values())
        self._names = (*fixed, *names)
        self._bounds = tuple(map(float, buckets))
        self._children: dict[tuple[str, ...], Tally] = {}

    def __call__(self, **labels: str) -> Tally:
        """The child for `labels`, in the order of their declaration."""
        key = tuple(labels.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = Tally(self._bounds)
        return child

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The registry's."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for key, child in self._children.items():
            cumulative = zip(bounds, map(float, itertools.accumulate(child.counts)), strict=True)
            family.add_metric((*self._fixed, *key), list(cumulative), child.total)
        return [family]


class MetricSet:
    """Declares metrics on one fresh registry, all with the same `fixed` labels."""

    def __init__(self, **fixed: str) -> None:
        self.registry = CollectorRegistry()
        self._fixed = fixed
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, text: str, **labels: Iterable[str]) -> Family[Counter]:
        """`labels` maps each further label to the values that exist from the start (none: as they come)."""
        return self._family(Counter(name, text, [*self._fixed, *labels], registry=self.registry), labels)

    def gauge(self, name: str, text: str, **labels: Iterable[str]) -> Family[Gauge]:
        """As `counter`."""
        return self._family(Gauge(name, text, [*self._fixed, *labels], registry=self.registry), labels)

    def histogram(self, name: str, text: str, buckets: Sequence[float], **labels: Iterable[str]) -> Family[Histogram]:
        """As `counter`; `buckets` in seconds."""
        metric = Histogram(name, text, [*self._fixed, *labels], buckets=buckets, registry=self.registry)
        return self._family(metric, labels)

    def tally(self, name: str, text: str, buckets: Sequence[float], **labels: Iterable[str]) -> TallyFamily:
        """As `histogram`, for what one thread alone observes, often."""
        family = TallyFamily(name, text, buckets, self._fixed, tuple(labels))
        self.registry.register(family)
        for values in itertools.product(*labels.values()):
            family(**dict(zip(labels, values, strict=True)))
        return family

    def _family(self, metric: Metric, labels: dict[str, Iterable[str]]) -> Family[Metric]:
        family = Family(metric, self._fixed)
        for values in itertools.product(*labels.values()):
            family(**dict(zip(labels, values, strict=True)))
        return family


def exposition(registry: CollectorRegistry) -> tuple[bytes, str]:
    """(body, Content-Type) of GET /metrics."""
    return generate_latest(registry), CONTENT_TYPE_PLAIN_1_0_0
