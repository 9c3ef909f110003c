"""Everything the handlers share, built once from what the composition root injects."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from farfill.clock import Clock, WallClock
from farfill.config.model import ClusterConfig
from farfill.gateway.background import BackgroundWork
from farfill.gateway.health import DecodeReach, PrefillHealth
from farfill.gateway.identity import server_name
from farfill.gateway.loads import OutstandingWork
from farfill.gateway.observe import GatewayObserver, SilentObserver
from farfill.gateway.pipeline.admit import Admission
from farfill.gateway.pipeline.attempt import LegContext, SignTicket
from farfill.gateway.pipeline.dispatch import Dispatcher
from farfill.gateway.pipeline.place import Membership, Placer
from farfill.gateway.records import RequestRecords
from farfill.gateway.tokenizer import LoadedTokenizer, TokenizerPool
from farfill.gateway.workers import WorkerClient

Metrics = Callable[[], tuple[bytes, str]]


def _no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDeps:
    """What a gateway is made of. `worker_tls` None means plain HTTP to workers (tests only)."""

    config: ClusterConfig
    model: LoadedTokenizer
    membership: Membership
    sign_ticket: SignTicket
    worker_tls: ssl.SSLContext | None
    clock: Clock = field(default_factory=WallClock)
    observer: GatewayObserver = field(default_factory=SilentObserver)
    metrics: Metrics = _no_metrics
    registry_away_s: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayService:
    """Running parts of one gateway."""

    deps: GatewayDeps
    pool: TokenizerPool
    admission: Admission
    placer: Placer
    health: PrefillHealth
    reach: DecodeReach
    work: OutstandingWork
    dispatcher: Dispatcher
    records: RequestRecords
    background: BackgroundWork
    client: WorkerClient

    async def start(self) -> None:
        """Open what needs the running loop."""
        await self.client.start()

    async def close(self) -> None:
        """Stop background work, then connections and threads."""
        await self.background.close()
        await self.client.close()
        self.pool.close()


def build_service(deps: GatewayDeps) -> GatewayService:
    """All parts, not yet started."""
    config = deps.config
    client = WorkerClient(
        tls=deps.worker_tls,
        connect_timeout_s=config.kv_transfer.timeout_ms / 1000,
        server_name=server_name,
    )
    health = PrefillHealth(config.routing.circuit_breaker, deps.clock, deps.observer)
    reach = DecodeReach(config.registry.lease_s, deps.clock)
    work = OutstandingWork()
    placer = Placer(config, deps.membership, health, work)
    legs = LegContext(
        config=config,
        client=client,
        placer=placer,
        health=health,
        work=work,
        sign_ticket=deps.sign_ticket,
        observer=deps.observer,
        clock=deps.clock,
    )
    dispatcher = Dispatcher(
        config=config,
        client=client,
        placer=placer,
        reach=reach,
        work=work,
        legs=legs,
        clock=deps.clock,
        observer=deps.observer,
    )
    return GatewayService(
        deps=deps,
        pool=TokenizerPool(),
        admission=Admission(config.gateway.max_concurrent_requests),
        placer=placer,
        health=health,
        reach=reach,
        work=work,
        dispatcher=dispatcher,
        records=RequestRecords(),
        background=BackgroundWork(),
        client=client,
    )
