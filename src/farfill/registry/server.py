"""The registry over HTTP: workers register themselves, everybody of the cluster watches.

    PUT    /v1/instances/{name}                    register or renew; body `InstanceMessage`
    DELETE /v1/instances/{name}?generation=G       leave
    GET    /v1/instances?after=REVISION&wait_s=S   all instances, once the revision differs from `after`
    GET    /health /live /ready /metrics

A worker may write its own name only, and only as what its certificate says it is.
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
from farfill.registry.messages import from_message, message_response, refusal, to_message
from farfill.registry.store import RegistryStore
from farfill.telemetry.metrics import RegistryMetrics, exposition
from farfill.transport.errors import IdentityError
from farfill.transport.tls import PeerIdentity, peer_identity
from farfill.wire.control import PROTOCOL_VERSION, VERSION_HEADER, InstanceMessage, InstancesReply, LeaseReply

log = structlog.get_logger()

MAX_BODY_BYTES = 64 * 1024
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
    """Joins the store to HTTP. `identify` tells who calls; only tests replace it."""

    cluster: str
    store: RegistryStore
    clock: Clock
    metrics: RegistryMetrics
    identify: Callable[[web.Request], PeerIdentity | None] = identity_of
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _started_s: float = 0.0

    def app(self) -> web.Application:
        """The routes, and the task that expires leases while the app runs."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._expiring)
        app.router.add_put("/v1/instances/{name}", self.put)
        app.router.add_delete("/v1/instances/{name}", self.delete)
        app.router.add_get("/v1/instances", self.list)
        for path in ("/health", "/live", "/ready"):
            app.router.add_get(path, self.alive)
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
        before = self.store.revision
        outcome = self.store.put(instance, self.clock.now_s())
        self.metrics.written(outcome)
        if outcome == "superseded":
            log.warning("registration_refused", reason=outcome, name=instance.name, generation=instance.generation)
            return refusal(409, outcome, f"another process has taken over the name {instance.name}")
        if outcome == "registered":
            log.info("instance_registered", name=instance.name, worker_site=instance.site, url=instance.url)
        self._publish(before)
        return message_response(LeaseReply(lease_s=self.store.lease_s))

    async def delete(self, request: web.Request) -> web.Response:
        """Leave. Nothing happens when another generation holds the name already."""
        name = request.match_info["name"]
        if (refused := self._refuse(request, WORKER_ROLES, name)) is not None:
            return refused
        before = self.store.revision
        removed = self.store.remove(name, request.query.get("generation", ""))
        if removed:
            self.metrics.written("deregistered")
            log.info("instance_left", name=name)
        self._publish(before)
        return message_response(LeaseReply(lease_s=self.store.lease_s))

    async def list(self, request: web.Request) -> web.Response:
        """Long poll; answers `InstancesReply`, unchanged when `wait_s` ran out."""
        if (refused := self._refuse(request, READER_ROLES)) is not None:
            return refused
        try:
            after = int(request.query.get("after", "0"))
            wait_s = min(max(float(request.query.get("wait_s", "0")), 0.0), MAX_WAIT_S)
        except ValueError:
            return refusal(400, "invalid_request", "after and wait_s must be numbers")
        self.metrics.watching(1)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news(after)
        finally:
            self.metrics.watching(-1)
        if self._settling(after):
            return refusal(503, "settling", "just started: workers have not had the time to register again")
        instances = [to_message(instance) for instance in self.store.instances()]
        return message_response(InstancesReply(revision=self.store.revision, instances=instances))

    async def alive(self, _request: web.Request) -> web.Response:
        """Any certificate of the CA may ask."""
        return web.json_response({"status": "ok", "instances": len(self.store.instances())})

    async def exposition(self, _request: web.Request) -> web.Response:
        """Prometheus text."""
        body, content_type = exposition(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _news(self, after: int) -> None:
        while self.store.revision == after or self._settling(after):
            await self._changed.wait()

    def _settling(self, after: int) -> bool:
        """A watcher that knew our predecessor must not see an empty cluster because we just restarted."""
        knew_predecessor = after not in (0, *range(self.store.first_revision, self.store.revision + 1))
        return knew_predecessor and self.clock.now_s() - self._started_s < self.store.lease_s

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

    def _publish(self, before: int) -> None:
        """Wake all watchers if the revision moved on since `before`."""
        if self.store.revision == before:
            return
        self.metrics.set_state(self.store.instances(), self.store.revision)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _expiring(self, _app: web.Application) -> AsyncIterator[None]:
        self._started_s = self.clock.now_s()
        task = asyncio.create_task(self._expire())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _expire(self) -> None:
        settled = False
        while True:
            await asyncio.sleep(min(self.store.lease_s / 10, 0.5))
            before = self.store.revision
            now_s = self.clock.now_s()
            gone = self.store.expire(now_s)
            for instance in gone:
                log.warning("lease_expired", name=instance.name, worker_site=instance.site)
            self.metrics.expired(len(gone))
            self._publish(before)
            if not settled and now_s - self._started_s >= self.store.lease_s:
                settled = True
                self._wake()
