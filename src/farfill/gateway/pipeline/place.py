"""Chooses where a prompt decodes and where it is prefilled, from the policies and what is known now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import structs

from farfill.clock import Clock
from farfill.config.model import ClusterConfig
from farfill.config.section import Section
from farfill.core.cluster import Instance, InstanceState, Placement, PlacementReason, Role
from farfill.core.errors import InvalidRequestError, UnavailableError
from farfill.gateway.adapt import Threshold
from farfill.gateway.decisions import DecisionTrail
from farfill.gateway.fallback import FallbackGate, FallbackGrant
from farfill.gateway.health import DecodeReach, PrefillHealth
from farfill.gateway.links import LinkView
from farfill.gateway.loads import OutstandingWork
from farfill.gateway.pipeline.far_side import FarSide
from farfill.gateway.prefixes import PrefixView
from farfill.gateway.rollout import RolloutState
from farfill.policy.candidates import Candidate, PlacementRequest, candidate
from farfill.policy.offload import BLOCKED_REASONS, Forced, uncached_tokens
from farfill.policy.pick import ready_decode
from farfill.policy.placement import DECODE_FILTERS, PREFILL_FILTERS, PlacementProfile, ProfileSettings
from farfill.policy.prefix import PrefixHits
from farfill.policy.replay import PlacementInputs, ShareInputs
from farfill.policy.rollout import ShareQuery, in_share
from farfill.wire.control import PROTOCOL_VERSION

FORCE_HEADER = "x-farfill-force-placement"

_OBSTACLES = {
    PlacementReason.NO_PREFILL_INSTANCE: "no prefill instance is ready",
    PlacementReason.FINGERPRINT_MISMATCH: "no ready prefill instance has the decode instance's fingerprint",
    PlacementReason.BREAKER_OPEN: "the circuit breakers of all prefill instances are open",
    PlacementReason.LINK_BUSY: "the links of all prefill instances are full",
    PlacementReason.PREFILL_OVERLOADED: "all prefill instances asked to be left alone for a moment",
}
assert set(_OBSTACLES) >= BLOCKED_REASONS, "every reason that keeps a prompt from going far has its words"


class Membership(Protocol):
    """Who is alive, as the registry told last."""

    def instances(self) -> tuple[Instance, ...]: ...


class PlacementQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`keys` are the prompt's prefix keys; `total_tokens` its length and that of the output to come."""

    request_id: str
    tenant: str
    session: str
    keys: Sequence[bytes]
    prompt_tokens: int
    total_tokens: int
    forced: Forced | None


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The placement, the prefix hits (tokens) it counts on near and far, and the decisions that led to it.

    `grant`: the prompt should have gone far; whoever prefills it near ends this. `took_s`: to decide all of it.
    """

    placement: Placement
    hit_tokens: int
    far_hit_tokens: int
    trail: DecisionTrail
    grant: FallbackGrant | None = None
    took_s: float = 0.0


class NotPlaced(msgspec.Struct, frozen=True):
    """A prompt that could go nowhere, and the decisions that led to it."""

    trail: DecisionTrail


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerParts:
    """What a placement looks at."""

    membership: Membership
    health: PrefillHealth
    reach: DecodeReach
    work: OutstandingWork
    links: LinkView
    prefixes: PrefixView
    threshold: Threshold
    rollout: RolloutState
    fallback: FallbackGate
    clock: Clock


class Placer:
    """Applies the policies. Holds no state but its settings."""

    def __init__(self, config: ClusterConfig, parts: PlacerParts) -> None:
        self._parts = parts
        self._seen: tuple[Instance, ...] = ()
        self.configure(config)

    def configure(self, config: ClusterConfig) -> None:
        """Settings for placements from now on."""
        placement, parts = config.routing.placement, self._parts
        self._model, self._site = config.model.name, config.gateway.site
        self._local_instead = config.routing.fallback_to_local_prefill
        self._shares = {name: tenant.max_share for name, tenant in config.admission.tenants.items()}
        self._decode = PlacementProfile(_settings(DECODE_FILTERS, placement.decode_weights, placement.picker))
        self._far = FarSide(
            routing=config.routing,
            chunk_tokens=config.prefill.chunked_prefill_tokens,
            profile=PlacementProfile(_settings(PREFILL_FILTERS, placement.prefill_weights, placement.picker)),
            threshold=parts.threshold,
            links=parts.links,
            health=parts.health,
        )

    def decode_ready(self, lost: Callable[[Instance], bool]) -> bool:
        """Whether any decode instance that is not `lost` can take a request."""
        return any(not lost(i) for i in ready_decode(self._parts.membership.instances(), self._model))

    def context_tokens(self, model_limit: int) -> int:
        """The longest context that can be served now: the model's, or less when all workers offer less."""
        ready = ready_decode(self._parts.membership.instances(), self._model)
        return min(model_limit, max((i.max_context_tokens for i in ready), default=model_limit))

    def place(self, query: PlacementQuery, exclude: Collection[str] = (), trail: DecisionTrail | None = None) -> Placed:
        """Raises UnavailableError without decode, or when the prompt should go far, cannot, and may not stay.

        What was decided, also before it raises, is added to `trail`.
        """
        parts = self._parts
        began_s = parts.clock.now_s()
        trail = trail or DecisionTrail(query.request_id, parts.clock.unix_s())
        instances = self._live()
        hits = parts.prefixes.hits(query.keys)
        asked = ShareQuery(model=self._model, tenant=query.tenant, session=query.session, request=query.request_id)
        request = self._request(query, Role.DECODE, exclude)
        version, avoided = parts.rollout.version(Role.DECODE, asked)
        request = structs.replace(request, version=version, avoid_versions=avoided)
        decode = self._choose_decode(request, instances, hits, trail)
        share = parts.rollout.share(self._model, query.tenant)
        included = in_share(share, asked)
        if share is not None:
            trail.add("rollout_share", ShareInputs(share, asked), included)
        version, avoided = parts.rollout.version(Role.PREFILL, asked)
        far = self._far.decide(
            structs.replace(
                request,
                role=Role.PREFILL,
                total_tokens=query.prompt_tokens,
                fingerprint=decode.instance.fingerprint,
                protocols=(decode.instance.protocol,),
                exclude=(decode.instance.name,),
                version=version,
                avoid_versions=avoided,
            ),
            self._candidates(instances, Role.PREFILL, hits, query.prompt_tokens, query.tenant),
            instances=instances,
            near_hit_tokens=decode.hit_tokens,
            forced=query.forced,
            in_rollout=included,
            trail=trail,
        )
        placement = Placement(
            decode=decode.instance,
            prefill=None if far.prefill is None else far.prefill.instance,
            reason=far.decision.reason,
            uncached_tokens=uncached_tokens(query.prompt_tokens, decode.hit_tokens),
            threshold_tokens=far.decision.threshold_tokens,
        )
        return Placed(
            placement=placement,
            hit_tokens=decode.hit_tokens,
            far_hit_tokens=0 if far.prefill is None else far.prefill.hit_tokens,
            trail=trail,
            grant=self._grant(placement, trail),
            took_s=parts.clock.now_s() - began_s,
        )

    def another_prefill(
        self, decode: Instance, failed: Collection[tuple[str, str]], avoid_site: str | None, trail: DecisionTrail
    ) -> Instance | None:
        """A prefill instance that may take over, if there is one.

        `failed` are (name, generation) of instances that were tried: a restarted one may try again. One of another site
        than `avoid_site` goes first.
        """
        others = [i for i in self._live() if (i.name, i.generation) not in failed and i.name != decode.name]
        request = PlacementRequest(
            model=self._model,
            role=Role.PREFILL,
            prompt_tokens=1,
            total_tokens=1,
            fingerprint=decode.fingerprint,
            protocols=(decode.protocol,),
        )
        nothing = PrefixHits({}, {})
        found = self._far.another(request, self._candidates(others, Role.PREFILL, nothing, 1, ""), avoid_site, trail)
        return None if found is None else found.instance

    def _choose_decode(
        self, request: PlacementRequest, instances: Sequence[Instance], hits: PrefixHits, trail: DecisionTrail
    ) -> Candidate:
        everywhere = self._candidates(instances, Role.DECODE, hits, request.prompt_tokens, request.tenant)
        # Each site has its decode pool; another site's helps out when one's own has nobody.
        candidates = [c for c in everywhere if c.instance.site == self._site] or everywhere
        choice = self._decode.choose(request, candidates)
        if choice.index is None and len(candidates) < len(everywhere):
            candidates = everywhere
            choice = self._decode.choose(request, candidates)
        if choice.index is None and any(not c.reachable for c in candidates):
            # One that could not be reached a moment ago is better than nobody.
            candidates = [structs.replace(c, reachable=True) for c in candidates]
            choice = self._decode.choose(request, candidates)
        trail.add("placement", PlacementInputs(self._decode.settings, request, tuple(candidates)), choice)
        if choice.index is None:
            full = any(
                name == "tenant_share" and candidates[i].instance.state is InstanceState.READY
                for i, name in choice.rejected
            )
            if full:
                raise UnavailableError(
                    "this tenant has its share of every decode instance", reason="tenant_share", side="decode"
                )
            raise UnavailableError(
                f"no decode instance of {self._model} is ready", reason="no_decode_instance", side="decode"
            )
        return candidates[choice.index]

    def _grant(self, placement: Placement, trail: DecisionTrail) -> FallbackGrant | None:
        """What should have gone far and cannot is a fallback: within the budget, or not at all."""
        if placement.reason not in _OBSTACLES:
            return None
        if not self._local_instead:
            raise UnavailableError(
                f"{_OBSTACLES[placement.reason]}, and fallback_to_local_prefill is off",
                reason=str(placement.reason),
                side="prefill",
            )
        return self._parts.fallback.ask(placement.uncached_tokens, trail)

    def _request(self, query: PlacementQuery, role: Role, exclude: Collection[str]) -> PlacementRequest:
        return PlacementRequest(
            model=self._model,
            role=role,
            prompt_tokens=query.prompt_tokens,
            total_tokens=query.total_tokens,
            session=query.session and f"{query.tenant}:{query.session}",
            spread=query.request_id,
            tenant=query.tenant,
            tenant_share=self._shares.get(query.tenant, self._shares.get("*", 1.0)),
            exclude=tuple(exclude),
            protocols=(PROTOCOL_VERSION,),
        )

    def _candidates(
        self, instances: Sequence[Instance], role: Role, hits: PrefixHits, prompt_tokens: int, tenant: str
    ) -> list[Candidate]:
        """All instances of `role` as whoever looks for one sees them: reach counts for decode, breakers for prefill."""
        parts, near = self._parts, role is Role.DECODE
        of, lost, allows, blocks = parts.work.of, parts.reach.lost, parts.health.allows, hits.blocks
        found: list[Candidate] = []
        for i in instances:
            if i.role is not role and i.role is not Role.MIXED:
                continue
            held = blocks.get(i.name, 0)
            hit_tokens = parts.prefixes.tokens(held, prompt_tokens) if held else 0
            tokens, requests, tenant_tokens = of(i.name, tenant)
            found.append(
                candidate(i, hit_tokens, tokens, requests, tenant_tokens, near or allows(i), not near or not lost(i))
            )
        return found

    def _live(self) -> tuple[Instance, ...]:
        instances = self._parts.membership.instances()
        if instances is not self._seen:
            self._seen = instances
            self._parts.prefixes.follow(instances)
            self._parts.health.retain(instances)
        return instances


def _settings(filters: tuple[str, ...], weights: Section, picker: str) -> ProfileSettings:
    return ProfileSettings(filters=filters, weights={n: w for n, w in weights.model_dump().items() if w}, picker=picker)


def forced_placement(header: str | None, *, allowed: bool) -> Forced | None:
    """What the placement header demands. Raises InvalidRequestError where it is not allowed or not known."""
    if header is None:
        return None
    if not allowed:
        raise InvalidRequestError(
            f"{FORCE_HEADER} is not allowed here (routing.allow_placement_override)",
            param=FORCE_HEADER,
            reason="placement_override_not_allowed",
        )
    try:
        return Forced(header)
    except ValueError:
        raise InvalidRequestError(
            f"{FORCE_HEADER} must be local or remote, got {header!r}", param=FORCE_HEADER
        ) from None
