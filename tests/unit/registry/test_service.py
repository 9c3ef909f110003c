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
from farfill.core.errors import ProtocolError
from farfill.registry.client import Announcer, InstanceWatcher
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.members import instance_of
from farfill.registry.messages import encode, from_message, to_message
from farfill.registry.records import GenerationsRecord, LinkRecord, decode_record, encode_record
from farfill.registry.remote import RemoteStore
from farfill.registry.server import RegistryService
from farfill.registry.store import Put, StoreError
from farfill.registry.store_wire import CommitCall, OperationMessage, ScanCall
from farfill.telemetry.metrics import RegistryMetrics
from farfill.transport.tls import PeerIdentity
from farfill.wire.control import ErrorBody, InstancesReply
from support.memory_disk import MemoryDisk

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
OTHER_LOAD = dataclasses.replace(DECODE, queued_tokens=9)
WORKER = PeerIdentity("farfill", "near", "decode", "d1")
GATEWAY = PeerIdentity("farfill", "near", "gateway", "gateway")
VERSION = {"x-farfill-protocol": "1"}


class Server:
    """One registry that can be stopped and started again on its port, with or without its disk."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.disk = MemoryDisk()
        self.peer: PeerIdentity | None = None
        self.port = 0
        self.url = ""
        self.store: EmbeddedStore
        self.service: RegistryService
        self._runner: web.AppRunner | None = None

    async def start(self, *, lease_s: float = 30.0, new_disk: bool = False) -> None:
        if new_disk:
            self.disk = MemoryDisk()
            self.clock.advance(0.001)
        metrics = RegistryMetrics(site="near", workers=[("near", "decode")])
        self.store = EmbeddedStore(self.disk, self.clock)
        await self.store.__aenter__()
        self.service = RegistryService("farfill", self.store, lease_s, self.clock, metrics, identify=self._identify)
        self._runner = web.AppRunner(self.service.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            await self.store.__aexit__(None, None, None)
            self._runner = None

    def instances(self) -> tuple[Instance, ...]:
        """What is in the store, whatever the mirror has heard."""
        return tuple(instance_of(entry) for entry in self.store._state.scan("instances/").entries)

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
            assert server.instances()[0].state is InstanceState.DRAINING
            await until(lambda: watcher.instances()[0].state is InstanceState.DRAINING)
            await announcer.announce(queued_tokens=77)
            await until(lambda: watcher.instances()[0].queued_tokens == 77)
        await until(lambda: watcher.instances() == ())
        assert not announcer.registered
    assert seen[0] == ()
    assert server.metric("farfill_registrations_total", site="near", role="registry", outcome="deregistered") == 1


async def test_watcher_opens_with_the_first_answer_or_after_its_patience(server: Server):
    async with Announcer(registry_url=server.url, ssl_context=None, instance=DECODE) as announcer:
        await until(lambda: announcer.registered)
        async with InstanceWatcher(registry_url=server.url, ssl_context=None, first_answer_s=10.0) as watcher:
            assert watcher.instances() == (DECODE,)
    await server.stop()
    async with InstanceWatcher(registry_url=server.url, ssl_context=None, first_answer_s=0.05) as watcher:
        assert not watcher.known


async def test_renewal_keeps_a_worker_and_silence_drops_it(server: Server):
    await server.stop()
    await server.start(lease_s=0.5)
    async with Announcer(registry_url=server.url, ssl_context=None, instance=DECODE):
        await until(lambda: bool(server.instances()))
        renewed = ("farfill_registrations_total", {"site": "near", "role": "registry", "outcome": "renewed"})
        await until(lambda: (server.metric(renewed[0], **renewed[1]) or 0) >= 2)
        server.clock.advance(0.4)
        count = server.metric(renewed[0], **renewed[1]) or 0
        await until(lambda: (server.metric(renewed[0], **renewed[1]) or 0) > count)
        server.clock.advance(0.4)
        assert server.instances() == (DECODE,)
    await server.service.members.put(dataclasses.replace(DECODE, generation="g2"))
    await until(lambda: server.metric("farfill_workers", site="near", role="decode", state="ready") == 1)
    server.clock.advance(0.6)
    await until(lambda: server.instances() == ())
    await until(lambda: server.metric("farfill_lease_expirations_total", site="near", role="registry") == 1)
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
        await until(lambda: "unreachable" in outcomes and watcher.stale_s > 0)
        assert watcher.instances() == (DECODE,)
        await announcer.announce(queued_tokens=5)
        await server.start(new_disk=True)
        await until(lambda: [i.queued_tokens for i in server.instances()] == [5])
        server.clock.advance(20.0)
        await announcer.announce(queued_tokens=6)
        await until(lambda: [i.queued_tokens for i in server.instances()] == [6])
        server.clock.advance(11.0)  # the new registry has given every worker time to come back
        await until(lambda: watcher.instances()[0].queued_tokens == 6)
        assert outcomes[-1] == "ok"
        assert watcher.stale_s == 0


async def test_leases_that_ran_out_while_the_store_was_away_empty_no_cluster(server: Server):
    """Nobody could renew: those known stay until they had the time to come back; one that does not is dropped then."""
    await server.stop()
    await server.start(lease_s=0.5)
    seen: list[int] = []
    watcher = InstanceWatcher(
        registry_url=server.url, ssl_context=None, on_change=lambda instances: seen.append(len(instances))
    )
    await server.service.members.put(DECODE)
    async with watcher:
        await until(lambda: seen == [1])
        follow = server.service.mirror
        follow._failed(StoreError("cut off", reason="unreachable"))
        server.clock.advance(1.0)  # its lease
        follow._answered()
        await until(lambda: server.instances() == ())
        assert watcher.instances() == (DECODE,)
        await until(lambda: watcher.instances() == ())
    assert seen == [1, 0]


async def test_failed_renewal_is_an_outage_though_the_watch_is_only_quiet(
    server: Server, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    """A link that swallows packets: the watch stands, and goes on with the leases that ran out meanwhile."""

    async def fail(instance: Instance) -> None:
        raise StoreError("cut off", reason="unreachable")

    await server.stop()
    await server.start(lease_s=0.5)
    watcher = InstanceWatcher(registry_url=server.url, ssl_context=None)
    await server.service.members.put(DECODE)
    async with watcher:
        await until(lambda: watcher.instances() == (DECODE,))
        monkeypatch.setattr(server.service.members, "put", fail)
        url = f"{server.url}/v1/instances/{DECODE.name}"
        async with http.put(url, data=encode(to_message(DECODE))) as response:
            assert response.status == 503
        server.clock.advance(1.0)  # its lease
        await until(lambda: server.service.members.instances() == ())
        heard_s = asyncio.get_running_loop().time()
        await until(lambda: watcher.instances() == ())
    assert asyncio.get_running_loop().time() - heard_s > server.service.lease_s, "it stayed for as long as it may take"


async def test_watcher_keeps_whom_a_restarted_registry_does_not_know_yet(server: Server):
    seen: list[int] = []
    watcher = InstanceWatcher(
        registry_url=server.url, ssl_context=None, on_change=lambda i: seen.append(len(i)), grace_s=1.0
    )
    await server.service.members.put(DECODE)
    async with watcher:
        await until(lambda: seen == [1])
        await server.stop()
        await until(lambda: watcher.stale_s > 0)
        server.clock.advance(31.0)
        await server.start()
        await server.service.members.remove(DECODE.name, DECODE.generation)
        await until(lambda: watcher.stale_s == 0)
        assert watcher.instances() == (DECODE,)
        await server.service.members.put(dataclasses.replace(DECODE, name="other"))
        await until(lambda: [i.name for i in watcher.instances()] == ["d1", "other"])
        await until(lambda: [i.name for i in watcher.instances()] == ["other"])


async def test_watcher_never_sees_an_empty_cluster_because_the_registry_lost_its_disk(server: Server):
    seen: list[int] = []
    watcher = InstanceWatcher(
        registry_url=server.url, ssl_context=None, on_change=lambda instances: seen.append(len(instances))
    )
    await server.service.members.put(DECODE)
    async with watcher:
        await until(lambda: seen == [1])
        await server.stop()
        await server.start(new_disk=True)
        reached = ("farfill_registry_watchers", {"site": "near", "role": "registry"})
        await until(lambda: server.metric(reached[0], **reached[1]) == 1)
        await server.service.members.put(dataclasses.replace(DECODE, name="other"))
        assert watcher.instances() == (DECODE,)
        server.clock.advance(31.0)
        await server.service.members.put(dataclasses.replace(DECODE, name="d2"))
        await until(lambda: "d2" in [i.name for i in watcher.instances()])
    assert 0 not in seen


async def test_restart_with_its_disk_keeps_every_worker_for_a_lease(server: Server):
    await server.service.members.put(DECODE)
    server.clock.advance(29.0)
    await server.stop()
    await server.start()
    server.clock.advance(29.0)
    watcher = InstanceWatcher(registry_url=server.url, ssl_context=None)
    async with watcher:
        await until(lambda: watcher.instances() == (DECODE,))
        server.clock.advance(2.0)
        await until(lambda: watcher.instances() == ())


async def test_registry_without_its_store_answers_503_and_is_not_ready(server: Server, http: aiohttp.ClientSession):
    await server.service.members.put(DECODE)
    await until(lambda: len(server.service._shown) == 1)
    server.disk.refuse = "full"
    async with http.put(f"{server.url}/v1/instances/d1", data=encode(to_message(OTHER_LOAD))) as response:
        assert await refused(response) == (503, "disk_refused")
    labels = {"site": "near", "role": "registry", "outcome": "store_unavailable"}
    assert server.metric("farfill_registrations_total", **labels) == 1
    server.disk.refuse = ""
    await server.store.__aexit__(None, None, None)
    await until(lambda: server.service.mirror.stale_s > 0)
    async with http.get(f"{server.url}/ready") as response:
        assert response.status == 503
        assert "away" in (await response.json())["missing"]
    async with http.get(f"{server.url}/v1/instances") as response:
        reply = msgspec.msgpack.decode(await response.read(), type=InstancesReply)
        assert [m.name for m in reply.instances] == ["d1"]
    assert server.metric("farfill_store_up", site="near", role="registry") == 0
    await server.store.__aenter__()
    await until(lambda: server.service.mirror.stale_s == 0)


async def test_two_registries_on_one_store_serve_the_same_workers(server: Server):
    other = RegistryService("farfill", server.store, 30.0, server.clock, RegistryMetrics(site="near", workers=[]))
    async with other.mirror:
        assert (await server.service.members.put(DECODE))[0] == "registered"
        await until(lambda: other.members.instances() == (DECODE,))
        assert (await other.members.put(OTHER_LOAD))[0] == "renewed"
        assert (await server.service.members.put(DECODE))[0] == "renewed"
        newer = dataclasses.replace(DECODE, generation="g2")
        first, second = await asyncio.gather(other.members.put(newer), server.service.members.put(newer))
        assert {first[0], second[0]} == {"registered", "renewed"}
        assert (await other.members.put(DECODE))[0] == "superseded"
        assert not await other.members.remove("d1", "g1")
        assert await other.members.remove("d1", "g2")
    assert server.instances() == ()
    assert len(server.store._state.leases()) <= 1


async def test_many_restarts_of_a_worker_keep_bounded_memory(server: Server):
    for i in range(40):
        await server.service.members.put(dataclasses.replace(DECODE, generation=str(i)))
    assert (await server.service.members.put(dataclasses.replace(DECODE, generation="38")))[0] == "superseded"
    former = server.store._state.get("generations/d1")
    assert former is not None
    assert len(decode_record(former.value, GenerationsRecord).former) == 16
    assert len(server.store._state.leases()) == 1


@pytest.mark.parametrize(
    ("peer", "call", "allowed"),
    [
        (GATEWAY, ScanCall("rollout/"), True),
        (WORKER, ScanCall("rollout/"), False),
        (WORKER, ScanCall(""), False),
        (WORKER, ScanCall("links/"), True),
        (GATEWAY, CommitCall([OperationMessage("rollout/m/*", b"x")]), True),
        (GATEWAY, CommitCall([OperationMessage("instances/d1", b"x")]), False),
        (GATEWAY, CommitCall([OperationMessage("leases/1", b"x")]), False),
        (WORKER, CommitCall([OperationMessage("prefixes/near/d1/k", b"x")]), True),
        (WORKER, CommitCall([OperationMessage("prefixes/near/d2/k", b"x")]), False),
        (WORKER, CommitCall([OperationMessage("instances/d1", b"x")]), False),
        (WORKER, CommitCall([OperationMessage("links/near/far", b"x")]), True),
        (WORKER, CommitCall([OperationMessage("links/far/near", b"x")]), False),
    ],
)
async def test_store_is_open_to_each_role_for_its_own(
    server: Server, http: aiohttp.ClientSession, peer, call, allowed: bool
):
    server.peer = peer
    async with http.post(f"{server.url}/v1/store", data=encode(call)) as response:
        assert response.status == (200 if allowed else 403), await response.text()


async def test_lease_of_another_is_no_use(server: Server, http: aiohttp.ClientSession):
    server.peer = GATEWAY
    async with RemoteStore(server.url, None) as store:
        lease = await store.grant(60)
        await store.commit([Put("requests/r", b"", lease.id)])
        server.peer = WORKER
        with pytest.raises(StoreError, match="is not") as caught:
            await store.revoke(lease.id)
        assert caught.value.reason == "forbidden"
        with pytest.raises(StoreError, match="is not"):
            await store.keep_alive(lease.id)
        with pytest.raises(StoreError, match="is not"):
            await store.commit([Put("links/near/far", b"", lease.id)])
        with pytest.raises(StoreError, match="seconds"):
            await store.grant(1e9)
        server.peer = GATEWAY
        assert await store.get("requests/r") is not None
        await store.revoke(lease.id)
        assert await store.get("requests/r") is None
    async with http.post(f"{server.url}/v1/store", data=b"\xc1") as response:
        assert await refused(response) == (400, "invalid_request")


def test_records_survive_the_disk_and_newer_ones_are_refused():
    record = LinkRecord(src_site="far", dst_site="near", rate_bytes_per_s=1e9, rtt_s=0.03)
    assert decode_record(encode_record(record), LinkRecord) == record
    with pytest.raises(ProtocolError, match="schema 2, this version reads up to 1"):
        decode_record(
            encode_record(LinkRecord(schema=2, src_site="a", dst_site="b", rate_bytes_per_s=1, rtt_s=1)), LinkRecord
        )
    with pytest.raises(ProtocolError, match="no LinkRecord"):
        decode_record(b"\x80", LinkRecord)


def test_instance_fields_survive_the_wire():
    original = dataclasses.replace(DECODE, kv_used_bytes=7, kv_total_bytes=70, state=InstanceState.DRAINING)
    assert from_message(to_message(original)) == original


async def test_poll_returns_unchanged_after_its_time(server: Server, http: aiohttp.ClientSession):
    await until(lambda: server.service.mirror.known)
    revision = server.store.born
    async with http.get(f"{server.url}/v1/instances?after={revision}&wait_s=0.01") as response:
        reply = msgspec.msgpack.decode(await response.read(), type=InstancesReply)
    assert (response.status, reply.revision, reply.instances) == (200, revision, [])


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
    assert server.instances() == ()
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
    assert server.instances() == (newer,)


async def test_health_and_metrics_answer(server: Server, http: aiohttp.ClientSession):
    for path in ("/health", "/live", "/ready"):
        async with http.get(server.url + path) as response:
            assert (response.status, (await response.json())["status"]) == (200, "ok")
    async with http.get(server.url + "/metrics") as response:
        assert "farfill_workers" in await response.text()
