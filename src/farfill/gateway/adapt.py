"""The threshold in force: fixed, or searched again on the latest prompts' lengths while the gateway runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import structlog

from farfill.clock import Clock
from farfill.config.routing import RoutingConfig
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.links import LinkView, regime_limits
from farfill.gateway.observe import PolicyObserver
from farfill.policy.regime import SearchTrigger, Strain
from farfill.policy.threshold import Curve, ThresholdInputs, search_threshold

log = structlog.get_logger("farfill.gateway")

MIN_LENGTHS = 64
PERIODIC = "new_lengths"
COUNT_PERIOD_S = 0.5
"""Instances are counted anew when they changed, or after so long: breakers change without telling."""


@dataclass(frozen=True, slots=True)
class _Pools:
    """Instances that can be used, the sites of far ones, and tokens that wait at a near one on average."""

    far: int
    near: int
    sites: frozenset[str]
    near_tokens: float


class Threshold:
    """`tokens` is what prompts are compared with now. Owned by the event loop.

    Searched when far or near prefill's queue surges, a link fills, or instances and links are not what they were
    (`policy.regime`), when all calmed down, and when half of the lengths are new; never more often than
    `routing.threshold_period_s`, and not before workers and links were measured.
    """

    def __init__(
        self, routing: RoutingConfig, links: LinkView, clock: Clock, observer: PolicyObserver, model: str = ""
    ) -> None:
        self.tokens = routing.remote_prefill_threshold_tokens
        self._routing = routing
        self._links = links
        self._clock = clock
        self._observer = observer
        self._model = model
        self._limits = regime_limits(routing)
        self._trigger = SearchTrigger(self._limits)
        self._new_lengths = 0
        self._searched_s = -inf
        self._counted: tuple[Sequence[Instance], float, _Pools] = ((), -inf, _Pools(0, 0, frozenset(), 0.0))
        observer.threshold_set(self.tokens, "", model)

    def configure(self, routing: RoutingConfig) -> None:
        """New settings from now on. A search goes on from where it is, unless the starting point was changed."""
        moved = routing.remote_prefill_threshold_tokens != self._routing.remote_prefill_threshold_tokens
        if moved or routing.threshold == "static":
            self.tokens = routing.remote_prefill_threshold_tokens
        self._routing, self._limits = routing, regime_limits(routing)
        self._trigger, self._new_lengths = SearchTrigger(self._limits), 0
        self._observer.threshold_set(self.tokens, "", self._model)

    def seen(self, uncached_tokens: int) -> None:
        """A prompt was placed."""
        if self._routing.threshold == "auto":
            self._trigger.seen(uncached_tokens)
            self._new_lengths += 1

    def search_if_due(
        self,
        instances: Sequence[Instance],
        queue_s: float,
        trail: DecisionTrail,
        usable: Callable[[Instance], bool] = lambda _: True,
    ) -> None:
        """`queue_s`: seconds of work at the busiest far site; `usable`: whether breakers let prompts to a far one."""
        if self._routing.threshold != "auto":
            return
        now_s, links = self._clock.now_s(), self._links
        lengths, pools = self._trigger.lengths(), self._pools(instances, usable, now_s)
        strain = Strain(
            far_queue_s=queue_s,
            near_queue_s=pools.near_tokens * (links.near_s_per_token or 0.0),
            utilisation=max((links.utilisation(link.site) for link in links.sites()), default=0.0),
            capacities=(float(pools.far), float(pools.near), self._egress_bytes_per_s(pools)),
        )
        trigger = self._trigger.due(strain, now_s)
        periodic = self._new_lengths >= max(MIN_LENGTHS, len(lengths) // 2)
        if trigger is None and not (periodic and now_s - self._searched_s >= self._routing.threshold_period_s):
            return
        inputs = self._inputs(pools, lengths)
        if inputs is None:
            return
        found = search_threshold(inputs)
        trail.add("threshold", inputs, found)
        self._trigger.searched(strain, now_s)
        self._searched_s, self._new_lengths = now_s, 0
        reason = PERIODIC if trigger is None else str(trigger)
        if found.changed:
            log.info(
                "threshold", tokens=found.threshold_tokens, before=self.tokens, reason=reason, rate=round(found.rate, 3)
            )
        self.tokens = found.threshold_tokens
        self._observer.threshold_set(self.tokens, reason, self._model)

    def _inputs(self, pools: _Pools, lengths: tuple[int, ...]) -> ThresholdInputs | None:
        """None while too little is known."""
        near_s, links = self._links.near_s_per_token, self._links
        measured = any(link.rate.value for link in links.sites())
        far_s = [link.prefill_s_per_token.value for link in links.sites() if link.prefill_s_per_token.value]
        if len(lengths) < MIN_LENGTHS or near_s is None or not measured or not far_s or not links.bytes_per_token:
            return None
        return ThresholdInputs(
            lengths=lengths,
            far_instances=pools.far,
            near_instances=pools.near,
            far_prefill_s=_line(sum(far_s) / len(far_s)),
            near_prefill_s=_line(near_s),
            kv_bytes=_line(links.bytes_per_token),
            egress_bytes_per_s=self._limits.target * self._egress_bytes_per_s(pools),
            lowest=self._routing.threshold_min_tokens,
            highest=self._routing.threshold_max_tokens,
            current=self.tokens,
        )

    def _egress_bytes_per_s(self, pools: _Pools) -> float:
        """What the links of sites that can be used were measured to carry."""
        return sum(link.rate.value or 0.0 for link in self._links.sites() if link.site in pools.sites)

    def _pools(self, instances: Sequence[Instance], usable: Callable[[Instance], bool], now_s: float) -> _Pools:
        counted, counted_s, known = self._counted
        if counted is instances and now_s - counted_s < COUNT_PERIOD_S:
            return known
        ready = [i for i in instances if i.state is InstanceState.READY]
        far = [i for i in ready if i.role is Role.PREFILL and usable(i)]
        near = [i.queued_tokens for i in ready if i.role is not Role.PREFILL]
        found = _Pools(len(far), len(near), frozenset(i.site for i in far), sum(near) / len(near) if near else 0.0)
        self._counted = instances, now_s, found
        return found


def _line(per_token: float) -> Curve:
    return Curve(((1000.0, 1000.0 * per_token),))
