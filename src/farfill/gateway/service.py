"""Everything the handlers share, built once from what the composition root injects."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from farfill.clock import Clock, WallClock
from farfill.config.model import ClusterConfig
from farfill.config.models import FIRST, config_for_model
from farfill.core.errors import ConfigError
from farfill.gateway.access import Access
from farfill.gateway.access_observe import AccessObserver, SilentAccessObserver
from farfill.gateway.adapt import Threshold
from farfill.gateway.background import BackgroundWork
from farfill.gateway.blocks import BlockFeeds
from farfill.gateway.decisions import DecisionLog
from farfill.gateway.fallback import FallbackGate
from farfill.gateway.far_reach import FarReach
from farfill.gateway.follow_config import ConfigFollower
from farfill.gateway.gate import Gate, build_gate
from farfill.gateway.health import DecodeReach, PrefillHealth
from farfill.gateway.identity import server_name
from farfill.gateway.links import LinkView
from farfill.gateway.loads import OutstandingWork
from farfill.gateway.lookup import RecordLookup
from farfill.gateway.lost import LostWatch
from farfill.gateway.media import MediaLoader, is_public
from farfill.gateway.models import ServedModels
from farfill.gateway.observe import GatewayObserver, PolicyObserver, SilentObserver, SilentPolicyObserver
from farfill.gateway.open_requests import OpenRequests
from farfill.gateway.parity import ParitySampler
from farfill.gateway.pipeline.admit import Admission
from farfill.gateway.pipeline.attempt import LegContext, SignTicket
from farfill.gateway.pipeline.dispatch import Dispatcher
from farfill.gateway.pipeline.media import PromptRenderer
from farfill.gateway.pipeline.place import Membership, Placer, PlacerParts
from farfill.gateway.prefixes import PrefixView
from farfill.gateway.recording import Recording
from farfill.gateway.records import RequestRecords
from farfill.gateway.reload import Reloader
from farfill.gateway.rollout import RolloutState
from farfill.gateway.shared import SharedParts, SharedState
from farfill.gateway.status import Traffic
from farfill.gateway.tokenizer import LoadedTokenizer, TokenizerPool
from farfill.gateway.workers import WorkerClient
from farfill.registry.store import Store

Metrics = Callable[[], tuple[bytes, str] | Awaitable[tuple[bytes, str]]]


def _no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDeps:
    """What a gateway is made of. `worker_tls` None means plain HTTP to workers (tests only)."""

    config: ClusterConfig
    model: LoadedTokenizer
    more_models: Mapping[str, LoadedTokenizer] = field(default_factory=dict[str, LoadedTokenizer])
    """By their keys under `models`."""
    membership: Membership
    sign_ticket: SignTicket
    worker_tls: ssl.SSLContext | None
    clock: Clock = field(default_factory=WallClock)
    observer: GatewayObserver = field(default_factory=SilentObserver)
    policies: PolicyObserver = field(default_factory=SilentPolicyObserver)
    base_dir: Path = Path()
    metrics: Metrics = _no_metrics
    registry_away_s: Callable[[], float] = lambda: 0.0
    may_fetch_from: Callable[[str], bool] = is_public
    store: Store | None = None
    """What gateways share; None: this one shares nothing."""
    access: Access | None = None
    entrance: AccessObserver = field(default_factory=SilentAccessObserver)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayService:
    """Running parts of one gateway."""

    deps: GatewayDeps
    pool: TokenizerPool
    renderer: PromptRenderer
    gate: Gate
    models: ServedModels
    admission: Admission
    placer: Placer
    health: PrefillHealth
    reach: DecodeReach
    work: OutstandingWork
    dispatcher: Dispatcher
    records: RequestRecords
    lookup: RecordLookup
    traffic: Traffic
    name: str
    links: LinkView
    prefixes: PrefixView
    threshold: Threshold
    rollout: RolloutState
    fallback: FallbackGate
    decision_log: DecisionLog | None
    recording: Recording | None
    shared: SharedState | None
    reloader: Reloader
    config_follower: ConfigFollower | None
    parity: ParitySampler
    background: BackgroundWork
    open_requests: OpenRequests
    client: WorkerClient
    feeds: BlockFeeds

    async def start(self) -> None:
        """Open what needs the running loop. Raises ConfigError when a log cannot be written."""
        for key, log in (("decision_log", self.decision_log), ("record_file", self.recording)):
            try:
                if log is not None:
                    log.start()
            except OSError as error:
                raise ConfigError(f"gateway.{key}: cannot be written: {error}") from error
        await self.client.start()
        self.dispatcher.lost.start()
        await self.feeds.start()
        if self.shared is not None:
            await self.shared.start()
        await self.lookup.start()
        if self.config_follower is not None:
            await self.config_follower.start()
        await self.gate.start()

    async def close(self) -> None:
        """Stop background work, then connections and threads."""
        await self.gate.close()
        if self.config_follower is not None:
            await self.config_follower.close()
        await self.lookup.close()
        if self.shared is not None:
            await self.shared.close()
        await self.background.close()
        await self.dispatcher.lost.close()
        await self.feeds.close()
        await self.client.close()
        self.pool.close()
        self.renderer.loader.close()
        for log in (self.decision_log, self.recording):
            if log is not None:
                await asyncio.to_thread(log.close)


def build_service(deps: GatewayDeps) -> GatewayService:
    """All parts, not yet started."""
    models = ServedModels()
    config = config_for_model(deps.config, FIRST)
    client = WorkerClient(
        tls=deps.worker_tls,
        connect_timeout_s=config.kv_transfer.timeout_ms / 1000,
        server_name=server_name,
    )
    name = f"gateway-{secrets.token_hex(6)}"
    parts, decision_log = _parts(deps, config), _decision_log(deps)
    records, background = RequestRecords(), BackgroundWork()
    placer = Placer(config, parts)
    admission = Admission(config.gateway, config.admission, deps.clock, deps.policies)
    legs = LegContext(
        config=config,
        client=client,
        placer=placer,
        health=parts.health,
        work=parts.work,
        links=parts.links,
        prefixes=parts.prefixes,
        fallback=parts.fallback,
        sign_ticket=deps.sign_ticket,
        observer=deps.observer,
        policies=deps.policies,
        clock=deps.clock,
    )
    dispatcher = Dispatcher(
        config=config,
        client=client,
        placer=placer,
        reach=parts.reach,
        work=parts.work,
        lost=LostWatch(deps.membership, config.registry.lease_s, deps.clock),
        legs=legs,
        clock=deps.clock,
        observer=deps.observer,
    )
    reloader = Reloader(deps.config, placer, admission, parts.threshold, parts.links, models.configure)
    service = GatewayService(
        deps=replace(deps, config=config),
        pool=TokenizerPool(),
        renderer=PromptRenderer(
            loader=MediaLoader(config.gateway, deps.observer, deps.may_fetch_from),
            client=client,
            membership=deps.membership,
            work=parts.work,
            model=config.model.name,
            observer=deps.observer,
        ),
        gate=build_gate(
            config, deps.clock, deps.entrance, name=name, access=deps.access, store=deps.store, admission=admission
        ),
        admission=admission,
        parity=ParitySampler(
            ratio=config.routing.rollout.parity_sample,
            model=config.model.name,
            dispatcher=dispatcher,
            rollout=parts.rollout,
            fallback=parts.fallback,
            observer=deps.policies,
        ),
        models=models,
        reloader=reloader,
        config_follower=(
            None if deps.store is None else ConfigFollower(deps.store, reloader, deps.base_dir, deps.policies)
        ),
        placer=placer,
        health=parts.health,
        reach=parts.reach,
        work=parts.work,
        links=parts.links,
        prefixes=parts.prefixes,
        threshold=parts.threshold,
        rollout=parts.rollout,
        fallback=parts.fallback,
        decision_log=decision_log,
        recording=_recording(deps),
        shared=_shared(deps, parts, decision_log, name),
        dispatcher=dispatcher,
        records=records,
        traffic=Traffic(deps.clock),
        name=name,
        lookup=RecordLookup(name, records, deps.store, background),
        background=background,
        open_requests=OpenRequests(),
        client=client,
        feeds=BlockFeeds(
            membership=deps.membership,
            prefixes=parts.prefixes,
            observer=deps.policies,
            tls=deps.worker_tls,
            connect_timeout_s=config.kv_transfer.timeout_ms / 1000,
            server_name=server_name,
        ),
    )
    far = FarReach(deps.membership.instances, client.reach, background, parts.health.reach_changed)
    client.on_timeout = far.timed_out
    parts.health.follow(far.lost)
    models.add(FIRST, service)
    for key, tokenizer in deps.more_models.items():
        models.add(key, _as_seen_by(service, parts, config_for_model(deps.config, key), tokenizer))
    return service


def _as_seen_by(
    service: GatewayService, parts: PlacerParts, config: ClusterConfig, tokenizer: LoadedTokenizer
) -> GatewayService:
    """The same gateway for another model."""
    deps, links = replace(service.deps, config=config, model=tokenizer), parts.links.for_model()
    own = replace(
        parts,
        links=links,
        threshold=Threshold(config.routing, links, deps.clock, deps.policies, config.model.name),
    )
    placer = Placer(config, own)
    legs = replace(service.dispatcher.legs, config=config, placer=placer, links=links)
    dispatcher = replace(service.dispatcher, config=config, placer=placer, legs=legs)
    return replace(
        service,
        deps=deps,
        renderer=replace(service.renderer, model=config.model.name),
        placer=placer,
        links=links,
        threshold=own.threshold,
        dispatcher=dispatcher,
        parity=replace(service.parity, model=config.model.name, dispatcher=dispatcher),
    )


def _parts(deps: GatewayDeps, config: ClusterConfig) -> PlacerParts:
    clock = deps.clock
    links = LinkView(config.routing, clock)
    return PlacerParts(
        membership=deps.membership,
        health=PrefillHealth(config.routing.circuit_breaker, clock, deps.observer),
        reach=DecodeReach(config.registry.lease_s, clock),
        work=OutstandingWork(),
        links=links,
        prefixes=PrefixView(config.prefill.chunked_prefill_tokens, enabled=config.engine.prefix_cache_mb > 0),
        threshold=Threshold(config.routing, links, clock, deps.policies, config.model.name),
        rollout=RolloutState(deps.policies, clock, shared=deps.store is not None),
        fallback=FallbackGate(config.routing.fallback_budget, clock, deps.policies),
        clock=clock,
    )


def _shared(deps: GatewayDeps, parts: PlacerParts, decision_log: DecisionLog | None, name: str) -> SharedState | None:
    if deps.store is None:
        return None
    return SharedState(
        SharedParts(
            store=deps.store,
            health=parts.health,
            links=parts.links,
            rollout=parts.rollout,
            config=deps.config.routing.rollout,
            observer=deps.policies,
            clock=deps.clock,
            decision_log=decision_log,
        ),
        name,
    )


def _decision_log(deps: GatewayDeps) -> DecisionLog | None:
    gateway = deps.config.gateway
    if gateway.decision_log is None:
        return None
    path = _own_file(deps, gateway.decision_log)
    return DecisionLog(path, gateway.decision_log_max_mb << 20, deps.policies.decisions_dropped)


def _recording(deps: GatewayDeps) -> Recording | None:
    gateway = deps.config.gateway
    if gateway.record_file is None:
        return None
    path = _own_file(deps, gateway.record_file)
    return Recording(path, gateway.record_max_mb << 20, deps.policies.recordings_dropped, lambda: deps.config)


def _own_file(deps: GatewayDeps, name: Path) -> Path:
    return deps.base_dir / str(name).replace("{pid}", str(os.getpid()))
