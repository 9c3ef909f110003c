"""What far prefills told of sites and their links: rates, KV per token, how full a link is. Owned by the event loop.

Several models share the links (`for_model`), but not what a token costs.

A link is the way from a far site to here. Rates come from the senders, which know whether the link was what slowed
them; how full it is, is what this gateway's own transfers put on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from farfill.clock import Clock
from farfill.config.routing import RoutingConfig
from farfill.core.cluster import Instance
from farfill.policy.regime import Bandwidth, BandwidthRegime, RegimeLimits
from farfill.topology.estimate import SmoothedValue
from farfill.wire.control import PrefillReport, StartEvent

WINDOW_S = 10.0


def regime_limits(routing: RoutingConfig) -> RegimeLimits:
    """As the cluster file says."""
    return RegimeLimits(
        target=routing.link_utilisation_target,
        scarce_above=routing.link_scarce_above,
        abundant_below=routing.link_abundant_below,
        dwell_s=routing.link_dwell_s,
        research_period_s=routing.threshold_period_s,
    )


@dataclass(slots=True)
class _Wire:
    """The link itself, whatever is sent over it."""

    regime: BandwidthRegime
    rate: SmoothedValue = field(default_factory=SmoothedValue)
    rtt: SmoothedValue = field(default_factory=SmoothedValue)
    sent: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    sent_bytes: int = 0


@dataclass(slots=True)
class SiteLink:
    """One far site and the link from it; None where nothing was measured yet."""

    site: str
    wire: _Wire
    prefill_s_per_token: SmoothedValue = field(default_factory=SmoothedValue)

    @property
    def regime(self) -> BandwidthRegime:
        """Whether the link has room."""
        return self.wire.regime

    @property
    def rate(self) -> SmoothedValue:
        """Bytes a second."""
        return self.wire.rate

    @property
    def rtt(self) -> SmoothedValue:
        """Seconds."""
        return self.wire.rtt


class LinkView:
    """All far sites by name; made as they are first seen."""

    def __init__(self, routing: RoutingConfig, clock: Clock, wires: dict[str, _Wire] | None = None) -> None:
        self._routing = routing
        self._limits = regime_limits(routing)
        self._clock = clock
        self._wires: dict[str, _Wire] = {} if wires is None else wires
        self._sites: dict[str, SiteLink] = {}
        self._wire_bytes_per_token = SmoothedValue()
        self._near_s_per_token = SmoothedValue()

    def for_model(self) -> LinkView:
        """The same links as another model sees them."""
        return LinkView(self._routing, self._clock, self._wires)

    def configure(self, routing: RoutingConfig) -> None:
        """New limits of links from now on; what was measured stays."""
        self._routing, self._limits = routing, regime_limits(routing)
        for wire in self._wires.values():
            wire.regime = BandwidthRegime(self._limits)

    def site(self, name: str) -> SiteLink:
        """What is known of a site."""
        found = self._sites.get(name)
        if found is None:
            if name not in self._wires:
                self._wires[name] = _Wire(BandwidthRegime(self._limits))
            found = self._sites[name] = SiteLink(name, self._wires[name])
        return found

    def sites(self) -> tuple[SiteLink, ...]:
        """All that were ever looked at for this model."""
        return tuple(self._sites.values())

    def all_sites(self) -> tuple[SiteLink, ...]:
        """All that were ever looked at, for whatever model."""
        return tuple(self.site(name) for name in sorted(self._wires))

    @property
    def bytes_per_token(self) -> float:
        """KV on the wire per prompt token, as sent lately; 0 before the first transfer."""
        return self._wire_bytes_per_token.value or 0.0

    @property
    def near_s_per_token(self) -> float | None:
        """Seconds of local prefill per token that was computed."""
        return self._near_s_per_token.value

    def far_ended(self, prefill: Instance, prompt_tokens: int, report: PrefillReport) -> None:
        """A far prefill is complete."""
        link, now_s = self.site(prefill.site), self._clock.now_s()
        if report.computed_tokens > 0 and report.prefill_s > 0:
            link.prefill_s_per_token.add(report.prefill_s / report.computed_tokens)
        if report.link_bytes_per_s > 0:
            link.rate.add(report.link_bytes_per_s)
        if report.link_rtt_s > 0:
            link.rtt.add(report.link_rtt_s)
        if prompt_tokens > 1:
            self._wire_bytes_per_token.add(report.wire_bytes / (prompt_tokens - 1))
        link.wire.sent.append((now_s, report.wire_bytes))
        link.wire.sent_bytes += report.wire_bytes
        link.regime.observe(self.utilisation(prefill.site), now_s)

    def near_ended(self, start: StartEvent) -> None:
        """Decode prefilled a prompt itself."""
        if start.prefilled_at != "remote" and start.computed_tokens > 1 and start.prefill_s > 0:
            self._near_s_per_token.add(start.prefill_s / start.computed_tokens)

    def utilisation(self, site: str) -> float:
        """Bytes of the last seconds over what the link was measured to carry, 0..1; 0 while that is not known."""
        wire, oldest_s = self.site(site).wire, self._clock.now_s() - WINDOW_S
        while wire.sent and wire.sent[0][0] < oldest_s:
            wire.sent_bytes -= wire.sent.popleft()[1]
        rate = wire.rate.value
        return 0.0 if not rate else min(1.0, wire.sent_bytes / (rate * WINDOW_S))

    def bandwidth(self, site: str) -> Bandwidth:
        """Whether the link has room, with hysteresis."""
        return self.site(site).regime.observe(self.utilisation(site), self._clock.now_s())
