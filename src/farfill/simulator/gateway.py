"""The simulated gateway: the policies that serve, fed with what a gateway knows."""

from __future__ import annotations

from collections.abc import Mapping

from farfill.core.cluster import PlacementReason, Role
from farfill.policy.breaker import BreakerLimits, CircuitBreaker, Outcome
from farfill.policy.budget import BudgetLimits, BudgetVerdict, FallbackBudget
from farfill.policy.candidates import Candidate, PlacementRequest
from farfill.policy.decider import OffloadQuery, SiteInputs, decide_offload
from farfill.policy.offload import Forced, uncached_tokens
from farfill.policy.placement import DECODE_WEIGHTS, PREFILL_WEIGHTS, PlacementProfile, ProfileSettings
from farfill.policy.prefix import BlockIndex, PrefixHits
from farfill.policy.regime import Bandwidth, RegimeLimits, SearchTrigger, Strain
from farfill.policy.rollout import Share, ShareQuery, in_share
from farfill.policy.threshold import Curve, ThresholdInputs, search_threshold
from farfill.simulator.decode import DecodeServer
from farfill.simulator.kernel import Kernel
from farfill.simulator.prefill import PrefillServer
from farfill.simulator.request import Request
from farfill.simulator.scenario import NEVER, Scenario
from farfill.simulator.sites import MODEL, Hardware, Site
from farfill.simulator.times import Sizes

NO_HITS = PrefixHits({}, {})
TELLING_FILTERS = ("exclude", "health")
"""All other filters of `policy.placement` ask for what instances here have alike (role, model, fingerprint, context),
and let everybody through; a test holds a run with all of them against one with these."""
_ALIKE_SCORES = frozenset({"kv_bytes", "tenant_share"})
"""Scorers that give every simulated instance the same: none has a known KV memory or tenants' shares."""
_MIN_LENGTHS = 64
"""`gateway.adapt` searches on no fewer new lengths either."""
_NEEDS_BUDGET = frozenset({PlacementReason.BREAKER_OPEN, PlacementReason.NO_PREFILL_INSTANCE})


class Gateway:
    """Owns index, breakers, budget, threshold and share. Placing changes nothing but what it counts."""

    def __init__(self, kernel: Kernel, scenario: Scenario, hardware: Hardware, sizes: Sizes, block_tokens: int) -> None:
        policies = scenario.file.policies
        self._kernel = kernel
        self._hardware = hardware
        self._sizes = sizes
        self._block_tokens = block_tokens
        self._policies = policies
        self._chunk_tokens = scenario.problem.chunk_tokens
        self._target = scenario.utilisation_target
        self._exact = policies.knows == "exact"
        self._decode = PlacementProfile(
            ProfileSettings(filters=TELLING_FILTERS, weights=_telling(policies.decode_weights or DECODE_WEIGHTS))
        )
        self._prefill = PlacementProfile(
            ProfileSettings(filters=TELLING_FILTERS, weights=_telling(policies.prefill_weights or PREFILL_WEIGHTS))
        )
        self._allowed: dict[PrefillServer, bool] = {}
        self._index = BlockIndex(policies.index_blocks)
        self._trigger = SearchTrigger(
            RegimeLimits(
                target=scenario.utilisation_target,
                surge_queue_s=policies.surge_queue_s,
                research_period_s=policies.research_period_s,
                window_lengths=policies.window_lengths,
            )
        )
        budget = policies.fallback_budget
        self.budget = FallbackBudget(
            BudgetLimits(
                tokens_per_s=budget.tokens_per_s,
                max_concurrent=budget.max_concurrent,
                itl_limit_s=budget.itl_limit_ms / 1000,
            )
        )
        self.share = Share(percent=policies.rollout.percent)
        self.threshold_tokens = scenario.threshold_tokens
        self.bandwidth = Bandwidth.SCARCE
        self.links_seen()
        self.searches = 0
        self._new_lengths = 0
        self._searched_s = 0.0
        self.far_done = 0
        self.far_failures = 0
        self.members_changed()

    def members_changed(self) -> None:
        """Instances came, went or restarted."""
        live = [server.instance for _, server in self._hardware.servers()]
        self._index.retain([i.name for i in live])
        for instance in live:
            self._index.join(instance.name, instance.site, instance.generation)

    def links_seen(self) -> None:
        """The regimes of links were looked at."""
        abundant = all(site.regime.state is Bandwidth.ABUNDANT for site in self._hardware.far)
        self.bandwidth = Bandwidth.ABUNDANT if abundant else Bandwidth.SCARCE

    def hits(self, request: Request) -> PrefixHits:
        """Who has how much of its prompt, as believed."""
        return self._index.hits(request.keys) if request.keys else NO_HITS

    def place_decode(self, request: Request, hits: PrefixHits) -> DecodeServer | None:
        """Where its tokens are made; None: nowhere."""
        servers = self._hardware.near.decode
        block, found = self._block_tokens, hits.blocks
        if found:
            candidates = [
                Candidate(i := s.instance, found.get(i.name, 0) * block, s.waiting_tokens, len(s.expected))
                for s in servers
            ]
        else:
            candidates = [Candidate(s.instance, 0, s.waiting_tokens, len(s.expected)) for s in servers]
        request.asked = self._asked(request)
        index = self._decode.pick(request.asked, candidates)
        return None if index is None else servers[index]

    def decide(self, request: Request, decode: DecodeServer, hits: PrefixHits) -> tuple[PlacementReason, Site | None]:
        """Whether its prompt is prefilled far, where, and why. Near, it is the caches of the near
        prefill instances that count, if there are any: they would compute it."""
        near = self._hardware.near
        near_hit = 0
        if hits.blocks:
            computing = near.prefill or [decode]
            near_hit = max([hits.at(s.instance.name) for s in computing])
        near_hit_tokens = min(near_hit * self._block_tokens, request.prompt - 1)
        policies = self._policies
        request.compared = uncached_tokens(request.prompt, near_hit_tokens)
        sites: list[SiteInputs] = []
        # Short prompts need not look at sites.
        if request.compared >= self.threshold_tokens or request.forced is Forced.REMOTE:
            for site in self._hardware.far:
                inputs = self._inputs(site, request, hits)
                if inputs is not None:
                    sites.append(inputs)
        percent = self.share.percent
        decision = decide_offload(
            OffloadQuery(
                prompt_tokens=request.prompt,
                near_hit_tokens=near_hit_tokens,
                threshold_tokens=self.threshold_tokens,
                bandwidth=self.bandwidth,
                sites=tuple(sites),
                forced=request.forced,
                in_rollout=percent >= 100
                or in_share(
                    self.share,
                    ShareQuery(
                        model=MODEL,
                        tenant=request.tenant,
                        session=request.session.name if request.session else "",
                        request=request.ident,
                    ),
                ),
                utilisation_limit=policies.utilisation_limit,
            )
        )
        self._trigger.seen(decision.compared_tokens)
        self._new_lengths += 1
        return decision.reason, None if decision.site is None else self._hardware.by_name[decision.site]

    def place_prefill(self, request: Request, site: Site, hits: PrefixHits) -> PrefillServer | None:
        """Which of the site's instances computes its prompt."""
        servers, found, block, exact = site.prefill, hits.blocks, self._block_tokens, self._exact
        allowed = self._allowed if site.link is not None else {}
        candidates = [
            Candidate(
                i := s.instance,
                found.get(i.name, 0) * block if found else 0,
                s.left_tokens() if exact else s.outstanding_tokens,
                s.outstanding,
                0,
                allowed.get(s, True),
            )
            for s in servers
        ]
        index = self._prefill.pick(request.asked, candidates)
        if index is None:
            return None
        server = servers[index]
        hit = min(hits.at(server.instance.name) * block, request.prompt - 1)
        request.uncached = uncached_tokens(request.prompt, hit)
        return server

    def may_fall_back(self, request: Request, reason: PlacementReason | None) -> str:
        """Empty when its prompt may be prefilled near although it belongs far; else the verdict."""
        if reason is not None and reason not in _NEEDS_BUDGET:
            return ""
        now_s = self._kernel.now_s
        answer = self.budget.ask(request.compared, now_s)
        if answer.verdict is BudgetVerdict.GRANTED:
            request.budgeted_s = now_s
            return ""
        return str(answer.verdict)

    def far_begins(self, request: Request, server: PrefillServer) -> None:
        """It is on its way to a far instance."""
        site = self._hardware.by_name[server.instance.site]
        tokens = server.outstanding_tokens + request.uncached
        estimate = site.estimator.estimate_s(tokens)
        request.estimate_s = -1.0 if estimate is None else estimate
        request.probe = self.breaker(server).begin(self._kernel.now_s)

    def far_ended(self, request: Request, server: PrefillServer, outcome: Outcome, took_s: float) -> None:
        """Its KV is here, or never will be."""
        excess_ms = (took_s - request.estimate_s) * 1000 if request.estimate_s >= 0 else 0.0
        self.breaker(server).end(outcome, self._kernel.now_s, probe=request.probe, excess_ms=excess_ms)
        self.far_done += outcome is not Outcome.NEUTRAL
        self.far_failures += outcome is Outcome.FAILURE
        if outcome is Outcome.SUCCESS and request.uncached:
            site = self._hardware.by_name[server.instance.site]
            site.estimator.observe(request.uncached, request.prefill_to_s - request.prefill_from_s)

    def cached_at(self, name: str, request: Request, reported_tokens: int | None) -> None:
        """An instance holds its prompt now, and found so many of its tokens there before."""
        if request.keys:
            blocks = None if reported_tokens is None else reported_tokens // self._block_tokens
            self._index.placed(name, request.keys, blocks)

    def breaker(self, server: PrefillServer) -> CircuitBreaker:
        """Of one far instance; a restart does not clear what is known of it."""
        found = server.breaker
        if found is None:
            given = self._policies.breaker
            found = server.breaker = CircuitBreaker(
                BreakerLimits(
                    error_rate_limit=given.error_rate_limit,
                    latency_p99_limit_ms=given.latency_p99_limit_ms,
                    window_s=given.window_s,
                    min_requests=given.min_requests,
                    open_s=given.open_s,
                )
            )
        return found

    def adapt(self) -> None:
        """Search the threshold again if `policy.regime` says so, or when half of the lengths it knows are new."""
        far, near = self._hardware.far, self._hardware.near
        if not self._policies.adapt_threshold or not far or self.threshold_tokens >= NEVER:
            return
        strain = Strain(
            far_queue_s=max(self._queue_s(site) for site in far),
            near_queue_s=self._queue_s(near),
            utilisation=max(site.utilisation for site in far),
            capacities=self._capacities(),
        )
        now_s = self._kernel.now_s
        enough = self._new_lengths >= max(_MIN_LENGTHS, len(self._trigger.lengths()) // 2)
        periodic = enough and now_s - self._searched_s >= self._policies.research_period_s
        if self._trigger.due(strain, now_s) is None and not periodic:
            return
        self.threshold_tokens = self._searched(far)
        self._trigger.searched(strain, now_s)
        self.searches += 1
        self._searched_s, self._new_lengths = now_s, 0

    def _capacities(self) -> tuple[float, ...]:
        hardware = self._hardware
        counts = [float(sum(s.ready for s in site.prefill)) for site in [hardware.near, *hardware.far]]
        return (*counts, *(site.link.rate for site in hardware.far if site.link is not None))

    def _searched(self, far: list[Site]) -> int:
        near = self._hardware.near
        near_count = sum(s.ready for s in near.prefill) or sum(s.ready for s in near.decode if s.can_prefill)
        times = near.times or far[0].times
        assert times is not None
        assert far[0].times is not None
        found = search_threshold(
            ThresholdInputs(
                lengths=self._trigger.lengths(),
                far_instances=sum(s.ready for site in far for s in site.prefill),
                near_instances=near_count,
                far_prefill_s=Curve(far[0].times.points()),
                near_prefill_s=Curve(times.points()),
                kv_bytes=Curve(self._sizes.points()),
                egress_bytes_per_s=self._target * sum(site.link.rate for site in far if site.link is not None),
                current=self.threshold_tokens,
                highest=NEVER - 1,
            )
        )
        return found.threshold_tokens

    def _inputs(self, site: Site, request: Request, hits: PrefixHits) -> SiteInputs | None:
        now_s, excluded = self._kernel.now_s, request.excluded
        ready = [s for s in site.prefill if s.ready and s.instance.name not in excluded]
        if not ready:
            return None
        assert site.link is not None
        allowed: list[PrefillServer] = []
        for server in ready:  # place_prefill, which comes next, goes by the same answers
            may = (server.breaker or self.breaker(server)).allows(now_s)
            self._allowed[server] = may
            if may:
                allowed.append(server)
        waiting = min([s.outstanding_tokens for s in allowed or ready])
        per_token = site.estimator.estimate_s(1)
        return SiteInputs(
            site=site.name,
            hit_tokens=min(hits.at_site(site.name) * self._block_tokens, request.prompt - 1) if hits.sites else 0,
            queue_s=waiting * per_token if per_token is not None else float(waiting > 0),
            prefill_s_per_token=per_token,
            link_bytes_per_s=max(1.0, site.link.rate),
            rtt_s=site.link.rtt_s,
            kv_bytes_per_token=self._sizes.per_token,
            kv_fixed_bytes=self._sizes.fixed,
            chunk_tokens=self._chunk_tokens,
            utilisation=site.utilisation,
            allowed=bool(allowed),
        )

    def _queue_s(self, site: Site) -> float:
        """Seconds until what waits at its prefill instances is computed, all of them together; where there are none,
        at its decode instances, which prefill then."""
        if site.times is None:
            return 0.0
        ready = [s for s in site.prefill if s.ready]
        if not ready:
            mixed = [s for s in site.decode if s.ready]
            waiting = sum(s.waiting_tokens for s in mixed)
            return site.times.alone_s(waiting) / len(mixed) if waiting else 0.0
        waiting = sum(s.waiting for s in ready)
        if not waiting:
            return 0.0
        tokens = sum(s.outstanding_tokens for s in ready)
        requests = sum(s.outstanding for s in ready)
        return requests * site.times.alone_s(tokens / requests) / len(ready)

    @staticmethod
    def _asked(request: Request) -> PlacementRequest:
        """For decode and prefill alike: no filter here looks at the role."""
        return PlacementRequest(
            model=MODEL,
            role=Role.DECODE,
            prompt_tokens=request.prompt,
            total_tokens=request.prompt + request.output,
            session=request.session.name if request.session else "",
            spread=request.ident,
            tenant=request.tenant,
            exclude=request.excluded,
        )


def _telling(weights: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in weights.items() if name not in _ALIKE_SCORES}
