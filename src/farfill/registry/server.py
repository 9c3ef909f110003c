"""The registry over HTTP: workers register themselves, everybody of the cluster watches.

    PUT    /v1/instances/{name}                    register or renew; body `InstanceMessage`
    DELETE /v1/instances/{name}?generation=G       leave
    GET    /v1/instances?after=REVISION&wait_s=S   all instances, once the revision differs from `after`; with
           &store_away=0|1                         also once the store is away (is back) after all
    POST   /v1/store                               the store itself, within what `registry.access` allows
    GET    /health /live /ready /metrics

A worker may write its own name only, and only as what its certificate says it is. The process keeps nothing but a
mirror of the store: several of them may serve one etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec
import structlog
from aiohttp import web

from farfill.clock import Clock
from farfill.core.cluster import Instance, Role
from farfill.core.errors import ProtocolError
from farfill.registry.client import LAST_BACKOFF_S
from farfill.registry.grace import Grace
from farfill.registry.members import Members
from farfill.registry.messages import from_message, message_response, refusal, to_message
from farfill.registry.mirror import Mirror
from farfill.registry.records import INSTANCES
from farfill.registry.store import Store, StoreError
from farfill.registry.store_handler import StoreHandler
from farfill.telemetry.metrics import RegistryMetrics, exposition
from farfill.transport.errors import IdentityError
from farfill.transport.tls import PeerIdentity, peer_identity
from farfill.wire.control import PROTOCOL_VERSION, VERSION_HEADER, InstanceMessage, InstancesReply, LeaseReply

log = structlog.get_logger()

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_WAIT_S = 60.0
WORKER_ROLES = frozenset(str(role) for role in Role)
READER_ROLES = WORKER_ROLES | {"gateway"}


def identity_of(request: web.Request) -> PeerIdentity | None:
    """Who presented the client certificate of this connection; None: nobody we can name."""
    transport = request.transport
    ssl_object = None if transport is None else transport.get_extra_info("ssl_object")
    if ssl_object is None:
        return None
    try:
        return peer_identity(ssl_object)
    except IdentityError as error:
        log.warning("identity_refused", reason=error.reason, error=str(error))
        return None


@dataclass
class RegistryService:
    """Joins an opened store to HTTP. `identify` tells who calls; only tests replace it."""

    cluster: str
    store: Store
    lease_s: float
    clock: Clock
    metrics: RegistryMetrics
    identify: Callable[[web.Request], PeerIdentity | None] = identity_of
    mirror: Mirror = field(init=False)
    members: Members = field(init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _shown: tuple[Instance, ...] = ()
    _left: set[str] = field(default_factory=set)
    _started_s: float = 0.0
    _outages: int = 0
    _later: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.mirror = Mirror(self.store, INSTANCES, on_change=self._publish, on_reach=self._wake, observer=self.metrics)
        self.members = Members(self.store, self.mirror, self.lease_s)
        self._handler = StoreHandler(self.store)
        self._grace = Grace(self.lease_s + LAST_BACKOFF_S)

    def app(self) -> web.Application:
        """The routes, and the mirror that follows the store while the app runs."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._following)
        app.router.add_put("/v1/instances/{name}", self.put)
        app.router.add_delete("/v1/instances/{name}", self.delete)
        app.router.add_get("/v1/instances", self.list)
        app.router.add_post("/v1/store", self.call_store)
        for path in ("/health", "/live"):
            app.router.add_get(path, self.alive)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/metrics", self.exposition)
        return app

    async def put(self, request: web.Request) -> web.Response:
        """Register or renew; answers `LeaseReply`."""
        try:
            message = msgspec.msgpack.decode(await request.read(), type=InstanceMessage)
            instance = from_message(message)
        except (msgspec.DecodeError, ProtocolError) as error:
            return refusal(400, "invalid_request", f"not an instance: {error}")
        if (refused := self._refuse_write(request, instance)) is not None:
            return refused
        try:
            outcome, ttl_s = await self.members.put(instance)
        except StoreError as error:
            self._grant_grace()  # a lease that runs out now says nothing about the worker
            return self._unavailable(request, error)
        self.metrics.written(outcome)
        if outcome == "superseded":
            log.warning("registration_refused", reason=outcome, name=instance.name, generation=instance.generation)
            return refusal(409, outcome, f"another process has taken over the name {instance.name}")
        if outcome == "registered":
            log.info("instance_registered", name=instance.name, worker_site=instance.site, url=instance.url)
        return message_response(LeaseReply(lease_s=ttl_s))

    async def delete(self, request: web.Request) -> web.Response:
        """Leave. Nothing happens when another generation holds the name already."""
        name = request.match_info["name"]
        if (refused := self._refuse(request, WORKER_ROLES, name)) is not None:
            return refused
        self._left.add(name)
        try:
            removed = await self.members.remove(name, request.query.get("generation", ""))
        except StoreError as error:
            return self._unavailable(request, error)
        if removed:
            self.metrics.written("deregistered")
            log.info("instance_left", name=name)
        else:
            self._left.discard(name)
        return message_response(LeaseReply(lease_s=self.lease_s))

    async def list(self, request: web.Request) -> web.Response:
        """Long poll; answers `InstancesReply`, unchanged when `wait_s` ran out or the store is away or back."""
        if (refused := self._refuse(request, READER_ROLES)) is not None:
            return refused
        try:
            after = int(request.query.get("after", "0"))
            wait_s = min(max(float(request.query.get("wait_s", "0")), 0.0), MAX_WAIT_S)
        except ValueError:
            return refusal(400, "invalid_request", "after and wait_s must be numbers")
        if (grace_s := self._grace.left_s(asyncio.get_running_loop().time())) > 0:
            wait_s = min(wait_s, grace_s + 0.05)  # who is dropped then changes no revision
        self.metrics.watching(1)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news(after, request.query.get("store_away"))
        finally:
            self.metrics.watching(-1)
        if not self.mirror.known:
            return refusal(503, "store_unavailable", "the store has not answered yet")
        if self._settling(after):
            return refusal(503, "settling", "just started: workers have not had the time to register again")
        instances = [to_message(instance) for instance in self._shown]
        reply = InstancesReply(revision=self.mirror.revision, instances=instances, store_away_s=self.mirror.stale_s)
        return message_response(reply)

    async def call_store(self, request: web.Request) -> web.Response:
        """One call of `registry.remote`."""
        if (refused := self._refuse(request, READER_ROLES)) is not None:
            return refused
        peer = self.identify(request)
        assert peer is not None, "checked by _refuse"
        return await self._handler.answer(peer, await request.read())

    async def alive(self, _request: web.Request) -> web.Response:
        """Any certificate of the CA may ask."""
        return web.json_response({"status": "ok", "instances": len(self._shown)})

    async def ready(self, _request: web.Request) -> web.Response:
        """Whether the store answers."""
        if self.mirror.known and self.mirror.stale_s == 0:
            return web.json_response({"status": "ok", "instances": len(self._shown)})
        text = f"the store has been away for {self.mirror.stale_s:.0f} s"
        return web.json_response({"status": "not ready", "missing": text}, status=503)

    async def exposition(self, _request: web.Request) -> web.Response:
        """Prometheus text."""
        body, content_type = exposition(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _news(self, after: int, store_away: str | None) -> None:
        """`store_away`: what the watcher knows of the store; None: it does not ask."""
        while not self.mirror.known or self.mirror.revision == after or self._settling(after):
            if store_away is not None and store_away != _flag(self.mirror.away):
                return
            await self._changed.wait()

    def _settling(self, after: int) -> bool:
        """A watcher that knew another store must not see an empty cluster because ours lost its disk."""
        knew_another = after != 0 and not self.store.born <= after <= self.mirror.revision
        return knew_another and self.clock.now_s() - self._started_s < self.lease_s

    def _refuse_write(self, request: web.Request, instance: Instance) -> web.Response | None:
        refused = self._refuse(request, WORKER_ROLES, request.match_info["name"])
        if refused is not None:
            return refused
        peer = self.identify(request)
        assert peer is not None, "checked by _refuse"
        if (instance.name, instance.site, str(instance.role)) == (peer.name, peer.site, peer.role):
            return None
        return self._forbid(request, peer, f"{peer} cannot register {instance.name} ({instance.role}, {instance.site})")

    def _refuse(self, request: web.Request, roles: frozenset[str], name: str | None = None) -> web.Response | None:
        """The refusal due to a caller that is not of `roles` (and `name`), None when it may proceed."""
        peer = self.identify(request)
        if peer is None or peer.cluster != self.cluster or peer.role not in roles or name not in (None, peer.name):
            return self._forbid(request, peer, f"{peer} may not {request.method} {request.path}")
        version = request.headers.get(VERSION_HEADER, "")
        if version != str(PROTOCOL_VERSION):
            log.warning("request_refused", reason="protocol_version", peer=str(peer), version=version)
            text = (
                f"protocol version {version or 'missing'} in {VERSION_HEADER}, this registry speaks {PROTOCOL_VERSION}"
            )
            return refusal(426, "protocol_version", text)
        return None

    def _forbid(self, request: web.Request, peer: PeerIdentity | None, text: str) -> web.Response:
        log.warning("request_refused", reason="forbidden", method=request.method, path=request.path, peer=str(peer))
        if request.method != "GET":
            self.metrics.written("forbidden")
        return refusal(403, "forbidden", text)

    def _unavailable(self, request: web.Request, error: StoreError) -> web.Response:
        log.warning("request_refused", reason=error.reason, method=request.method, path=request.path, error=str(error))
        self.metrics.written("store_unavailable")
        return refusal(503, error.reason, str(error))

    def _publish(self) -> None:
        """The mirror moved: wake all watchers, and count who went without saying so."""
        loop, before = asyncio.get_running_loop(), {i.name for i in self._shown}
        if self.mirror.outages > self._outages:
            self._outages = self.mirror.outages
            self._grant_grace()
        self._shown = self._grace.merge(self._shown, self.members.instances(), loop.time(), self._left)
        gone = before - {i.name for i in self._shown}
        lost = gone - self._left
        self._left -= gone
        for name in sorted(lost):
            log.warning("instance_lost", name=name, reason="lease_expired")
        self.metrics.expired(len(lost))
        self.metrics.set_state(self._shown, self.mirror.revision)
        self._wake()

    def _grant_grace(self) -> None:
        """Who is missing stays shown for a while."""
        loop = asyncio.get_running_loop()
        self._grace.outage_ended(loop.time())
        if self._later is not None:
            self._later.cancel()
        self._later = loop.call_later(self._grace.left_s(loop.time()), self._publish)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _following(self, _app: web.Application) -> AsyncIterator[None]:
        self._started_s = self.clock.now_s()
        async with self.mirror:
            task = asyncio.create_task(self._settle())
            yield
            if self._later is not None:
                self._later.cancel()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _settle(self) -> None:
        """Wake those who wait for us to settle."""
        while self.clock.now_s() - self._started_s < self.lease_s:  # noqa: ASYNC110 (tests move the clock)
            await asyncio.sleep(min(self.lease_s / 10, 0.5))
        self._wake()


def _flag(value: bool) -> str:
    return "1" if value else "0"
