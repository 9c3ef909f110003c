"""What goes wrong by the clock or by chance: instances die and come back, links weaken, fluctuate and are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from farfill.core.cluster import FallbackReason, InstanceState
from farfill.simulator.link import SharedLink
from farfill.simulator.request import Request
from farfill.simulator.scenario_file import EventSection
from farfill.simulator.sites import Server, Site
from farfill.simulator.traffic import drawn, generator

if TYPE_CHECKING:
    from farfill.simulator.world import World

_LEAST = 0.05


class Troubles:
    """Plans what the scenario says; `flow_started` keeps watch over transfers that begin on a cut link."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._file = world.scenario.file
        self._kernel = world.kernel
        rng = generator(self._file.seed, 8)
        self._life = drawn(lambda count: [float(v) for v in rng.exponential(1.0, count)])

    def begin(self) -> None:
        """Plan all events."""
        for event in self._file.events:
            self._kernel.at(event.at_s, self._event, event)
        for stream, site in enumerate(self._world.hardware.far):
            shape = self._file.links.get(site.name)
            if shape is not None and shape.fluctuation > 0 and site.link is not None:
                rng = generator(self._file.seed, 100 + stream)
                deviation = shape.fluctuation
                draw = drawn(lambda n, rng=rng, d=deviation: [float(v) for v in rng.normal(1.0, d, n)])
                self._fluctuate((site.link, draw, shape.fluctuation_s))
        if self._file.failures is not None:
            for site, server in self._world.hardware.servers():
                self._kernel.at(self._life() * self._file.failures.mean_up_s, self._dies, (site, server))

    def flow_started(self, link: SharedLink, request: Request) -> None:
        """A transfer began; if the link is cut, it fails after a while."""
        if link.rate <= 0:
            self._watch(link, request)

    def _event(self, event: EventSection) -> None:
        if event.link is not None:
            link = self._world.hardware.by_name[event.link].link
            assert link is not None
            link.set_factor("event", event.factor)
            if event.factor == 0:
                for flow in link.flows():
                    self._watch(link, flow.job)
            if event.for_s is not None:
                self._kernel.at(self._kernel.now_s + event.for_s, self._restored, link)
            return
        found = [(s, v) for s, v in self._world.hardware.servers() if v.instance.name == event.instance]
        for site, server in found:
            self._down(server)
            if event.for_s is not None:
                self._kernel.at(self._kernel.now_s + event.for_s, self._up, (site, server))

    def _restored(self, link: SharedLink) -> None:
        link.set_factor("event", 1.0)

    def _watch(self, link: SharedLink, request: Request) -> None:
        lost_s = self._kernel.now_s + self._file.policies.link_lost_s
        self._kernel.at(lost_s, self._still_cut, (link, request, request.attempt))

    def _still_cut(self, job: tuple[SharedLink, Request, int]) -> None:
        link, request, attempt = job
        if link.rate <= 0 and request.attempt == attempt and request.flow is not None:
            self._world.far_failed(request, FallbackReason.LINK_LOST)

    def _dies(self, job: tuple[Site, Server]) -> None:
        assert self._file.failures is not None
        site, server = job
        if server in site.decode or server in site.prefill:
            self._down(server)
            self._kernel.at(self._kernel.now_s + self._life() * self._file.failures.repair_s, self._repaired, job)

    def _repaired(self, job: tuple[Site, Server]) -> None:
        assert self._file.failures is not None
        self._up(job)
        self._kernel.at(self._kernel.now_s + self._life() * self._file.failures.mean_up_s, self._dies, job)

    def _down(self, server: Server) -> None:
        self._world.hardware.set_state(server, InstanceState.STARTING)
        self._world.gateway.members_changed()
        self._world.server_lost(server)

    def _up(self, job: tuple[Site, Server]) -> None:
        _, server = job
        self._world.hardware.set_state(server, InstanceState.READY, restarted=True)
        self._world.gateway.members_changed()

    def _fluctuate(self, job: tuple[SharedLink, Callable[[], float], float]) -> None:
        link, draw, period_s = job
        link.set_factor("fluctuation", max(_LEAST, draw()))
        self._kernel.at(self._kernel.now_s + period_s, self._fluctuate, job)
