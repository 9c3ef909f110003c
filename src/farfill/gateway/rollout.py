"""Which share of requests this gateway lets go far, and what it sees of those that did. Owned by the event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from farfill.clock import Clock
from farfill.core.cluster import FallbackReason, PlacementReason, Role
from farfill.gateway.observe import PolicyObserver
from farfill.policy.rollout import ANY, Share, ShareQuery, StepObservation, Sticky, share_for, version_of
from farfill.registry.records import ObservedShare, RolloutRecord
from farfill.registry.rollouts import ShareKey, version_share_of

MAX_TTFTS = 2000
MIN_TTFTS = 20
NOTHING_FAR = Share(percent=0.0)
# What happens at decode, or to the client, says nothing about far prefill.
# Of the far side: what decode lacks, or cannot read, says nothing of whom it came from.
NO_FAULT = frozenset(
    {FallbackReason.NONE, FallbackReason.KV_MEMORY, FallbackReason.KV_NOT_LOADED, FallbackReason.WITHDRAWN}
)


@dataclass(slots=True)
class _Step:
    """What was seen under one version of a share."""

    version: int
    far_requests: int = 0
    far_failures: int = 0
    parity_samples: int = 0
    parity_mismatches: int = 0
    far_ttft_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_TTFTS))
    near_ttft_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=MAX_TTFTS))


class RolloutState:
    """Without any share, everything may go far. Where gateways share them, nothing may before they were heard of:
    one that starts while the registry is away must not undo a revert."""

    def __init__(self, observer: PolicyObserver, clock: Clock, *, shared: bool = False) -> None:
        self._observer = observer
        self._clock = clock
        self._shares: dict[ShareKey, Share] = {(ANY, ANY): NOTHING_FAR} if shared else {}
        self._versions: dict[Role, dict[str, Share]] = {}
        self._steps: dict[ShareKey, _Step] = {}
        self.records: dict[ShareKey, RolloutRecord] = {}
        """As heard last."""

    def share(self, model: str, tenant: str) -> Share | None:
        """The most particular one."""
        return share_for(self._shares, model, tenant)

    def version(self, role: Role, query: ShareQuery) -> tuple[str, tuple[str, ...]]:
        """See `policy.rollout.version_of`."""
        shares = self._versions.get(role)
        return ("", ()) if shares is None else version_of(shares, query)

    def use(self, records: Mapping[ShareKey, RolloutRecord]) -> None:
        """From now on. A share with a new version is watched anew."""
        self.records = dict(records)
        self._shares = {
            key: Share(
                percent=record.percent,
                sticky=Sticky.REQUEST if record.sticky == "request" else Sticky.SESSION,
                salt=record.salt,
            )
            for key, record in records.items()
        }
        self._versions = {}
        for key, share in self._shares.items():
            if (found := version_share_of(key)) is not None:
                self._versions.setdefault(found[0], {})[found[1]] = share
        for key, record in records.items():
            if key not in self._steps or self._steps[key].version != record.version:
                self._steps[key] = _Step(record.version)
        for key in set(self._steps) - set(records):
            del self._steps[key]
        self._observer.rollout_set({key: record.percent for key, record in records.items()})

    def finished(
        self, model: str, tenant: str, reason: str, fallback: FallbackReason, *, placed_far: bool, ttft_s: float | None
    ) -> None:
        """A request that was placed has ended."""
        step = self._step(model, tenant)
        if step is None:
            return
        if placed_far:
            failed = fallback not in NO_FAULT
            step.far_requests += 1
            step.far_failures += failed
            if ttft_s is not None and not failed:
                step.far_ttft_s.append(ttft_s)
        elif reason == PlacementReason.ROLLOUT and ttft_s is not None:
            step.near_ttft_s.append(ttft_s)

    def served(self, role: Role, version: str, *, failed: bool, ttft_s: float | None) -> None:
        """An instance of `version` did its part of a request, or `failed` to: seen by all rollouts of its role."""
        for key, step in self._steps.items():
            found = version_share_of(key)
            if found is None or found[0] is not role:
                continue
            if found[1] == version:
                step.far_requests += 1
                step.far_failures += failed
                if ttft_s is not None and not failed:
                    step.far_ttft_s.append(ttft_s)
            elif ttft_s is not None and not failed:
                step.near_ttft_s.append(ttft_s)

    def parity(self, model: str, tenant: str, *, equal: bool) -> None:
        """A prompt prefilled far was computed near as well."""
        step = self._step(model, tenant)
        if step is not None:
            step.parity_samples += 1
            step.parity_mismatches += not equal

    def _step(self, model: str, tenant: str) -> _Step | None:
        keys = ((model, tenant), (model, ANY), (ANY, tenant), (ANY, ANY))
        return next((self._steps[key] for key in keys if key in self._steps), None)

    def observed(self, link_utilisation: float) -> list[ObservedShare]:
        """What this gateway saw of each share, for all of them to decide on."""
        return [
            ObservedShare(
                model=key[0],
                tenant=key[1],
                version=step.version,
                far_requests=step.far_requests,
                far_failures=step.far_failures,
                ttft_ratio=_ratio(step),
                link_utilisation=link_utilisation,
                parity_samples=step.parity_samples,
                parity_mismatches=step.parity_mismatches,
            )
            for key, step in self._steps.items()
        ]

    def observation(self, key: ShareKey, seen: Iterable[ObservedShare]) -> StepObservation:
        """All gateways together: counts add up, of ratios and utilisations the worst counts."""
        record = self.records[key]
        own = [s for s in seen if (s.model, s.tenant) == key and s.version == record.version]
        ratios = [s.ttft_ratio for s in own if s.ttft_ratio is not None]
        return StepObservation(
            percent=record.percent,
            step_age_s=max(0.0, self._clock.unix_s() - record.unix_s),
            far_requests=sum(s.far_requests for s in own),
            far_failures=sum(s.far_failures for s in own),
            ttft_ratio=max(ratios, default=None),
            link_utilisation=max((s.link_utilisation for s in own), default=0.0),
            parity_samples=sum(s.parity_samples for s in own),
            parity_mismatches=sum(s.parity_mismatches for s in own),
        )


def _ratio(step: _Step) -> float | None:
    if min(len(step.far_ttft_s), len(step.near_ttft_s)) < MIN_TTFTS:
        return None
    near_s = _p95(step.near_ttft_s)
    return _p95(step.far_ttft_s) / near_s if near_s > 0 else None


def _p95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[ceil(0.95 * len(ordered)) - 1]
