"""The far half of a placement: which sites could take a prompt, which one does, and which of its instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from farfill.config.routing import RoutingConfig
from farfill.core.cluster import Instance, InstanceState, PlacementReason, Role
from farfill.gateway.adapt import Threshold
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.health import PrefillHealth
from farfill.gateway.links import LinkView
from farfill.policy.candidates import Candidate, PlacementRequest
from farfill.policy.decider import OffloadDecision, OffloadQuery, SiteInputs, decide_offload
from farfill.policy.offload import Forced, uncached_tokens
from farfill.policy.placement import Choice, PlacementProfile
from farfill.policy.regime import Bandwidth
from farfill.policy.replay import PlacementInputs

# Where nothing was measured yet, work that waits still tells a busy site from an idle one.
UNKNOWN_S_PER_TOKEN = 1e-6


class FarPlacement(msgspec.Struct, frozen=True):
    """`prefill` is set exactly when the prompt goes far."""

    decision: OffloadDecision
    prefill: Candidate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FarSide:
    """Stateless beyond its collaborators."""

    routing: RoutingConfig
    chunk_tokens: int
    profile: PlacementProfile
    threshold: Threshold
    links: LinkView
    health: PrefillHealth

    def decide(
        self,
        request: PlacementRequest,
        candidates: Sequence[Candidate],
        *,
        instances: Sequence[Instance],
        near_hit_tokens: int,
        forced: Forced | None,
        in_rollout: bool,
        trail: DecisionTrail,
    ) -> FarPlacement:
        """`request` is for a prefill instance; `candidates` are all that prefill, `instances` all there are."""
        prompt_tokens, threshold_tokens = request.prompt_tokens, self.threshold.tokens
        near_uncached = uncached_tokens(prompt_tokens, near_hit_tokens)
        self.threshold.seen(near_uncached)
        sites: dict[str, list[Candidate]] = {}
        blocked: PlacementReason | None = None
        if forced is Forced.REMOTE or (forced is None and near_uncached >= max(1, threshold_tokens)):
            choice = self.profile.choose(request, candidates)
            for index, _, _ in choice.scores:
                sites.setdefault(candidates[index].instance.site, []).append(candidates[index])
            if not sites:
                blocked = self._obstacle(choice, candidates)
                trail.add("placement", self._inputs(request, candidates), choice)
        query = OffloadQuery(
            prompt_tokens=prompt_tokens,
            near_hit_tokens=near_hit_tokens,
            threshold_tokens=threshold_tokens,
            bandwidth=self._bandwidth(sites),
            sites=tuple(self._site(name, found, prompt_tokens) for name, found in sites.items()),
            forced=forced,
            in_rollout=in_rollout,
            blocked=blocked,
            utilisation_limit=self.routing.link_utilisation_limit,
        )
        decision = decide_offload(query)
        trail.add("offload", query, decision)
        queue_s = max((s.queue_s for s in query.sites), default=0.0)
        self.threshold.search_if_due(instances, queue_s, trail, self._usable)
        if decision.site is None:
            return FarPlacement(decision, None)
        there = sites[decision.site]
        choice = self.profile.choose(request, there)
        trail.add("placement", self._inputs(request, there), choice)
        assert choice.index is not None, "they passed the filters a moment ago"
        return FarPlacement(decision, there[choice.index])

    def another(
        self,
        request: PlacementRequest,
        candidates: Sequence[Candidate],
        avoid_site: str | None,
        trail: DecisionTrail,
    ) -> Candidate | None:
        """Who may take over from a failed sender; one of another site than `avoid_site` goes first."""
        choice = self.profile.choose(request, candidates)
        usable = [candidates[i] for i, _, _ in choice.scores if self.health.site_allows(candidates[i].instance.site)]
        usable = [c for c in usable if c.instance.site != avoid_site] or usable
        if not usable:
            return None
        choice = self.profile.choose(request, usable)
        trail.add("placement", self._inputs(request, usable), choice)
        return None if choice.index is None else usable[choice.index]

    def _usable(self, instance: Instance) -> bool:
        return self.health.allows(instance) and self.health.site_allows(instance.site)

    def _inputs(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> PlacementInputs:
        return PlacementInputs(self.profile.settings, request, tuple(candidates))

    def _bandwidth(self, sites: dict[str, list[Candidate]]) -> Bandwidth:
        scope = self.routing.cache_scope
        if scope != "auto":
            return Bandwidth.SCARCE if scope == "site" else Bandwidth.ABUNDANT
        scarce = any(self.links.bandwidth(name) is Bandwidth.SCARCE for name in sites)
        return Bandwidth.SCARCE if scarce or not sites else Bandwidth.ABUNDANT

    def _site(self, name: str, there: Sequence[Candidate], prompt_tokens: int) -> SiteInputs:
        link = self.links.site(name)
        s_per_token = link.prefill_s_per_token.value
        return SiteInputs(
            site=name,
            hit_tokens=min(max(c.hit_tokens for c in there), prompt_tokens - 1),
            queue_s=min(c.waiting_tokens for c in there) * (s_per_token or UNKNOWN_S_PER_TOKEN),
            prefill_s_per_token=s_per_token,
            link_bytes_per_s=link.rate.value,
            rtt_s=link.rtt.value or 0.0,
            kv_bytes_per_token=self.links.bytes_per_token,
            chunk_tokens=self.chunk_tokens,
            utilisation=self.links.utilisation(name),
            allowed=self.health.site_allows(name),
        )

    def _obstacle(self, choice: Choice, candidates: Sequence[Candidate]) -> PlacementReason:
        """Why no filter let anybody through, nearest to success first."""
        rejected = [
            (candidates[index].instance, name)
            for index, name in choice.rejected
            if candidates[index].instance.state is InstanceState.READY
            and candidates[index].instance.role in (Role.PREFILL, Role.MIXED)
        ]
        unhealthy = [instance for instance, name in rejected if name == "health"]
        if unhealthy:
            paused = all(self.health.overloaded(instance) for instance in unhealthy)
            return PlacementReason.PREFILL_OVERLOADED if paused else PlacementReason.BREAKER_OPEN
        if any(name in ("fingerprint", "protocol") for _, name in rejected):
            return PlacementReason.FINGERPRINT_MISMATCH
        return PlacementReason.NO_PREFILL_INSTANCE
