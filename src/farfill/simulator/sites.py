"""The simulated hardware: sites with instances that live and die, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.planner.profile import Profile
from farfill.policy.estimate import PrefillEstimator
from farfill.policy.regime import BandwidthRegime, RegimeLimits
from farfill.simulator.cache import BlockCache
from farfill.simulator.decode import DecodeServer
from farfill.simulator.kernel import Kernel
from farfill.simulator.link import SharedLink, goodput
from farfill.simulator.prefill import PrefillServer
from farfill.simulator.request import Listeners
from farfill.simulator.scenario import Scenario
from farfill.simulator.scenario_file import LinkShape
from farfill.simulator.times import PrefillTimes, StepTimes
from farfill.simulator.traffic import longest_tokens
from farfill.simulator.turns import TurnLimits, TurnsDecode, TurnsPrefill

MODEL = "simulated"
FINGERPRINT = "simulated"
Server = PrefillServer | DecodeServer


@dataclass(slots=True)
class Site:
    """One site. `link` leads from a far one to the near one; `utilisation` is the link's, of late."""

    name: str
    prefill: list[PrefillServer]
    decode: list[DecodeServer]
    times: PrefillTimes | None
    link: SharedLink | None
    regime: BandwidthRegime
    estimator: PrefillEstimator = field(default_factory=PrefillEstimator)
    utilisation: float = 0.0
    carried: float = 0.0
    gone_busy_s: float = 0.0


class Hardware:
    """Makes sites and servers, and changes their state. `changed` is told when an instance came or went."""

    def __init__(self, kernel: Kernel, scenario: Scenario, block_tokens: int, told: Listeners) -> None:
        self._kernel = kernel
        self._scenario = scenario
        self._block_tokens = block_tokens
        self._told = told
        self._longest = longest_tokens(scenario)
        self._numbers: dict[tuple[str, Role], int] = {}
        self._generation = 0
        problem, fleet = scenario.problem, scenario.fleet
        self._steps = StepTimes(problem.near.profile)
        self.max_batch = self._steps.max_batch
        self._turns = _turn_limits(scenario, self.max_batch)
        self.near = self._site(problem.near.name, problem.near.profile, None)
        self.far = [
            self._site(
                site.name,
                site.profile,
                SharedLink(
                    kernel,
                    _carries(link.bytes_per_s, link.rtt_s, scenario.file.links.get(site.name, LinkShape())),
                    link.rtt_s,
                ),
            )
            for site, link in problem.far
            if fleet.far.get(site.name, 0) or _scaled(scenario, site.name)
        ]
        self.by_name = {site.name: site for site in [self.near, *self.far]}
        for _ in range(fleet.near_decode):
            self.add(self.near, Role.DECODE)
        for _ in range(fleet.near_prefill):
            self.add(self.near, Role.PREFILL)
        for site in self.far:
            for _ in range(fleet.far.get(site.name, 0)):
                self.add(site, Role.PREFILL)

    def servers(self) -> list[tuple[Site, Server]]:
        """All there are, in order."""
        return [(s, server) for s in [self.near, *self.far] for server in [*s.decode, *s.prefill]]

    def add(self, site: Site, role: Role, state: InstanceState = InstanceState.READY) -> Server:
        """One more instance of that role."""
        number = self._numbers.get((site.name, role), 0)
        self._numbers[site.name, role] = number + 1
        instance = Instance(
            name=f"{site.name}-{role.value}-{number}",
            role=role,
            site=site.name,
            url="",
            transfer_address="",
            model=MODEL,
            fingerprint=FINGERPRINT,
            generation=self._next_generation(),
            state=state,
            max_context_tokens=1 << 40,
        )
        if role is Role.DECODE:
            decode = self._decode_server(site, instance)
            site.decode.append(decode)
            return decode
        prefill = self._prefill_server(site, instance)
        site.prefill.append(prefill)
        return prefill

    def set_state(self, server: Server, state: InstanceState, *, restarted: bool = False) -> None:
        """A new state; after a restart also a new generation."""
        generation = self._next_generation() if restarted else server.instance.generation
        server.instance = replace(server.instance, state=state, generation=generation)

    def remove(self, site: Site, server: Server) -> None:
        """It is gone for good. Idempotent."""
        if isinstance(server, DecodeServer):
            site.decode = [s for s in site.decode if s is not server]
        else:
            if server in site.prefill:
                site.gone_busy_s += server.busy_s
            site.prefill = [s for s in site.prefill if s is not server]

    def _decode_server(self, site: Site, instance: Instance) -> DecodeServer:
        cache = BlockCache(self._scenario.file.caches.decode_tokens // self._block_tokens)
        parts = (self._kernel, instance, self._steps, site.times, self._told)
        chunk_tokens = self._scenario.problem.chunk_tokens
        if self._turns is None:
            return DecodeServer(*parts, cache=cache, chunk_tokens=chunk_tokens)
        return TurnsDecode(
            *parts,
            cache=cache,
            chunk_tokens=chunk_tokens,
            block_tokens=self._block_tokens,
            limits=self._turns,
        )

    def _prefill_server(self, site: Site, instance: Instance) -> PrefillServer:
        assert site.times is not None, "a site that prefills has times"
        cache = BlockCache(self._scenario.file.caches.prefill_tokens // self._block_tokens)
        parts = (self._kernel, instance, site.times, self._told)
        if self._turns is None:
            return PrefillServer(*parts, cache=cache, block_tokens=self._block_tokens)
        return TurnsPrefill(*parts, cache=cache, block_tokens=self._block_tokens, limits=self._turns)

    def _site(self, name: str, profile: Profile, link: SharedLink | None) -> Site:
        times = None if profile.prefill is None else PrefillTimes(profile, self._longest)
        limits = RegimeLimits(
            target=self._scenario.utilisation_target,
            surge_queue_s=self._scenario.file.policies.surge_queue_s,
            research_period_s=self._scenario.file.policies.research_period_s,
            window_lengths=self._scenario.file.policies.window_lengths,
        )
        return Site(name, [], [], times, link, BandwidthRegime(limits))

    def _next_generation(self) -> str:
        self._generation += 1
        return str(self._generation)


def _carries(bytes_per_s: float, rtt_s: float, shape: LinkShape) -> float:
    return goodput(bytes_per_s, rtt_s, shape.loss, shape.connections, loss_based=shape.congestion == "cubic")


def _turn_limits(scenario: Scenario, max_batch: int) -> TurnLimits | None:
    engine, chunk_tokens = scenario.file.engine, scenario.problem.chunk_tokens
    if engine.prefill != "in_turns":
        return None
    return TurnLimits(chunk_tokens=chunk_tokens, step_tokens=engine.step_tokens or chunk_tokens, max_rows=max_batch)


def _scaled(scenario: Scenario, site: str) -> bool:
    section = scenario.file.autoscale
    return section is not None and f"{site}/prefill" in section.roles
