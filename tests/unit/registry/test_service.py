"""Registry and clients together over real HTTP (without TLS: the caller's identity is injected)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

import aiohttp
import msgspec
import pytest
from aiohttp import web

from farfill.clock import VirtualClock
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.registry.client import Announcer, InstanceWatcher
from farfill.registry.messages import encode, to_message
from farfill.registry.server import RegistryService
from farfill.registry.store import RegistryStore
from farfill.telemetry.metrics import RegistryMetrics
from farfill.transport.tls import PeerIdentity
from farfill.wire.control import ErrorBody, InstancesReply

DECODE = Instance(
    name="d1",
    role=Role.DECODE,
    site="near",
    url="https://127.0.0.1:1",
    transfer_address="127.0.0.1:2",
    model="tiny",
    fingerprint="f",
    generation="g1",
    state=InstanceState.READY,
    max_context_tokens=100,
)
WORKER = PeerIdentity("farfill", "near", "decode", "d1")
GATEWAY = PeerIdentity("farfill", "near", "gateway", "gateway")
VERSION = {"x-farfill-protocol": "1"}


class Server:
    """One registry that can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.peer: PeerIdentity | None = None
        self.port = 0
        self.url = ""
        self.service: RegistryService
        self._runner: web.AppRunner | None = None

    async def start(self, *, lease_s: float = 30.0, first_revision: int = 1) -> None:
        metrics = RegistryMetrics(site="near", workers=[("near", "decode")])
        store = RegistryStore(lease_s, first_revision)
        self.service = RegistryService("farfill", store, self.clock, metrics, identify=self._identify)
        self._runner = web.AppRunner(self.service.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def metric(self, name: str, **labels: str) -> float | None:
        return self.service.metrics.registry.get_sample_value(name, labels)

    def _identify(self, request: web.Request) -> PeerIdentity | None:
        if self.peer is not None:
            return self.peer
        return GATEWAY if request.method == "GET" else WORKER


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    running = Server()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=VERSION) as session:
        yield session


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def refused(response: aiohttp.ClientResponse) -> tuple[int, str]:
    return response.status, msgspec.msgpack.decode(await response.read(), type=ErrorBody).reason


async def test_worker_appears_changes_and_leaves(server: Server):
    seen: list[tuple[Instance, ...]] = []
    watcher = InstanceWatcher(registry_url=server.url, ssl_context=None, on_change=seen.append)
    async with watcher:
        await until(lambda: watcher.known)
        assert watcher.instances() == ()
        async with Announcer(registry_url=server.url, ssl_context=None, instance=DECODE) as announcer:
            await until(lambda: watcher.instances() == (DECODE,))
            assert announcer.registered
            await announcer.announce(state=InstanceState.DRAINING)
            assert server.service.store.instances()[0].state is InstanceState.DRAINING
            await until(lambda: watcher.instances()[0].state is InstanceState.DRAINING)
            await announcer.announce(queued_tokens=77)
            await until(lambda: watcher.instances()[0].queued_tokens == 77)
        await until(lambda: watcher.instances() == ())
        assert not announcer.registered
    assert seen[0] == ()
    assert server.metric("farfill_registrations_total", site="near", role="registry", outcome="deregistered") == 1


async def test_renewal_keeps_a_worker_and_silence_drops_it(server: Server):
    await server.stop()
    await server.start(lease_s=0.5)
    async with Announcer(registry_url=server.url, ssl_context=None, instance=DECODE):
        await until(lambda: bool(server.service.store.instances()))
        renewed = ("farfill_registrations_total", {"site": "near", "role": "registry", "outcome": "renewed"})
        await until(lambda: (server.metric(renewed[0], **renewed[1]) or 0) >= 2)
        server.clock.advance(0.4)
        count = server.metric(renewed[0], **renewed[1]) or 0
        await until(lambda: (server.metric(renewed[0], **renewed[1]) or 0) > count)
        server.clock.advance(0.4)
        assert server.service.store.instances() == (DECODE,)
    server.service.store.put(DECODE, server.clock.now_s())
    server.clock.advance(0.6)
    await until(lambda: server.service.store.instances() == ())
    assert server.metric("farfill_lease_expirations_total", site="near", role="registry") == 1
    assert server.metric("farfill_workers", site="near", role="decode", state="ready") == 0


async def test_clients_live_through_a_registry_that_is_away(server: Server):
    outcomes: list[str] = []

    class Observer:
        def registry_answered(self, outcome: str) -> None:
            outcomes.append(outcome)

    watcher = InstanceWatcher(registry_url=server.url, ssl_context=None, observer=Observer())
    announcer = Announcer(registry_url=server.url, ssl_context=None, instance=DECODE)
    async with announcer, watcher:
        await until(lambda: watcher.instances() == (DECODE,))
        await server.stop()
        await until(lambda: "unreachable" in outcomes)
        assert watcher.instances() == (DECODE,)
        await announcer.announce(queued_tokens=5)
        await server.start(first_revision=1_000_000)
        await until(lambda: [i.queued_tokens for i in server.service.store.instances()] == [5])
        server.clock.advance(20.0)
        await announcer.announce(queued_tokens=6)
        await until(lambda: [i.queued_tokens for i in server.service.store.instances()] == [6])
        server.clock.advance(11.0)  # the new registry has given every worker time to come back
        await until(lambda: watcher.instances()[0].queued_tokens == 6)
        assert outcomes[-1] == "ok"


async def test_watcher_never_sees_an_empty_cluster_because_the_registry_restarted(server: Server):
    seen: list[int] = []
    watcher = InstanceWatcher(
        registry_url=server.url, ssl_context=None, on_change=lambda instances: seen.append(len(instances))
    )
    server.service.store.put(DECODE, 0.0)
    async with watcher:
        await until(lambda: seen == [1])
        await server.stop()
        await server.start(first_revision=1_000_000)
        reached = ("farfill_registry_watchers", {"site": "near", "role": "registry"})
        await until(lambda: server.metric(reached[0], **reached[1]) == 1)
        server.service.store.put(dataclasses.replace(DECODE, name="other"), server.clock.now_s())
        server.service._publish(0)
        assert watcher.instances() == (DECODE,)
        server.clock.advance(31.0)
        server.service.store.put(dataclasses.replace(DECODE, name="d2"), server.clock.now_s())
        await until(lambda: [i.name for i in watcher.instances()] == ["d2"])
    assert 0 not in seen


async def test_poll_returns_unchanged_after_its_time(server: Server, http: aiohttp.ClientSession):
    async with http.get(f"{server.url}/v1/instances?after=1&wait_s=0.01") as response:
        reply = msgspec.msgpack.decode(await response.read(), type=InstancesReply)
    assert (response.status, reply.revision, reply.instances) == (200, 1, [])


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (None, "forbidden"),
        (dataclasses.replace(WORKER, name="d2"), "forbidden"),
        (dataclasses.replace(WORKER, site="far"), "forbidden"),
        (dataclasses.replace(WORKER, role="prefill"), "forbidden"),
        (dataclasses.replace(WORKER, cluster="other"), "forbidden"),
        (GATEWAY, "forbidden"),
    ],
)
async def test_worker_may_write_only_itself(server: Server, http: aiohttp.ClientSession, peer, reason: str):
    server.service.identify = lambda _request: peer
    async with http.put(f"{server.url}/v1/instances/d1", data=encode(to_message(DECODE))) as response:
        assert await refused(response) == (403, reason)
    assert server.service.store.instances() == ()
    assert server.metric("farfill_registrations_total", site="near", role="registry", outcome="forbidden") == 1


async def test_stranger_may_not_read(server: Server, http: aiohttp.ClientSession):
    for peer in (None, dataclasses.replace(GATEWAY, cluster="other"), dataclasses.replace(GATEWAY, role="registry")):
        server.service.identify = lambda _request, peer=peer: peer
        async with http.get(f"{server.url}/v1/instances") as response:
            assert await refused(response) == (403, "forbidden")


async def test_other_protocol_version_is_refused(server: Server, http: aiohttp.ClientSession):
    async with http.get(f"{server.url}/v1/instances", headers={"x-farfill-protocol": "2"}) as response:
        assert await refused(response) == (426, "protocol_version")


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("PUT", "/v1/instances/d1", b"\xc1", (400, "invalid_request")),
        ("PUT", "/v1/instances/d1", encode(to_message(DECODE)).replace(b"decode", b"decoda"), (400, "invalid_request")),
        ("GET", "/v1/instances?after=x", b"", (400, "invalid_request")),
    ],
)
async def test_nonsense_is_refused(server: Server, http: aiohttp.ClientSession, method, path, body, expected):
    async with http.request(method, server.url + path, data=body) as response:
        assert await refused(response) == expected


async def test_former_self_is_told_that_it_was_superseded(server: Server, http: aiohttp.ClientSession):
    newer = dataclasses.replace(DECODE, generation="g2")
    for instance, status in ((DECODE, 200), (newer, 200), (DECODE, 409)):
        async with http.put(f"{server.url}/v1/instances/d1", data=encode(to_message(instance))) as response:
            assert response.status == status
    async with http.delete(f"{server.url}/v1/instances/d1?generation=g1") as response:
        assert response.status == 200
    assert server.service.store.instances() == (newer,)


async def test_health_and_metrics_answer(server: Server, http: aiohttp.ClientSession):
    for path in ("/health", "/live", "/ready"):
        async with http.get(server.url + path) as response:
            assert (response.status, (await response.json())["status"]) == (200, "ok")
    async with http.get(server.url + "/metrics") as response:
        assert "farfill_workers" in await response.text()
