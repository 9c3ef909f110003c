"""One suite for every store: what `registry.store` promises, kept by each of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from farfill.clock import WallClock
from farfill.core.errors import InvalidRequestError
from farfill.registry.disk import FolderDisk
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.mirror import Mirror
from farfill.registry.remote import RemoteStore
from farfill.registry.server import RegistryService
from farfill.registry.store import (
    Batch,
    CompactedError,
    Delete,
    LeaseLostError,
    Put,
    Store,
    StoreError,
    Unchanged,
)
from farfill.telemetry.metrics import RegistryMetrics
from farfill.transport.tls import PeerIdentity
from support.etcd import EtcdServer

GATEWAY = PeerIdentity("farfill", "near", "gateway", "gateway")
ROOT = "requests/"  # a prefix that gateways may write, for the store behind the registry
_names = itertools.count()


@dataclass
class Case:
    """An opened store; `restart` ends it like a crash and brings it back."""

    store: Store
    restart: Callable[[], Awaitable[None]]
    min_lease_s: float


@contextlib.asynccontextmanager
async def embedded_case(folder: Path) -> AsyncIterator[Case]:
    disk = FolderDisk(folder)
    store = EmbeddedStore(disk, WallClock())
    await store.__aenter__()

    async def restart() -> None:
        await store.__aexit__(None, None, None)
        await store.__aenter__()

    try:
        yield Case(store, restart, 0.3)
    finally:
        await store.__aexit__(None, None, None)
        disk.close()


@contextlib.asynccontextmanager
async def remote_case(folder: Path) -> AsyncIterator[Case]:
    """The embedded store as another role sees it."""
    port = 0
    async with embedded_case(folder) as inner:

        async def serve() -> web.AppRunner:
            nonlocal port
            metrics = RegistryMetrics(site="near", workers=[])
            service = RegistryService("farfill", inner.store, 5.0, WallClock(), metrics, identify=lambda _: GATEWAY)
            runner = web.AppRunner(service.app(), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            port = runner.addresses[0][1]
            return runner

        runner = await serve()

        async def restart() -> None:
            nonlocal runner
            await runner.cleanup()
            await inner.restart()
            runner = await serve()

        async with RemoteStore(f"http://127.0.0.1:{port}", None) as store:
            yield Case(store, restart, 0.5)
        await runner.cleanup()


@contextlib.asynccontextmanager
async def etcd_case(server: EtcdServer) -> AsyncIterator[Case]:
    async def restart() -> None:
        server.kill()
        await asyncio.to_thread(server.start)

    async with server.store(f"case-{next(_names)}/") as store:
        yield Case(store, restart, 1.0)


@pytest.fixture(params=["embedded", "remote", "etcd"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    opening = {
        "embedded": lambda: embedded_case(tmp_path / "store"),
        "remote": lambda: remote_case(tmp_path / "store"),
        "etcd": lambda: etcd_case(request.getfixturevalue("etcd")),
    }[request.param]()
    async with opening as opened:
        yield opened


@pytest.fixture
def store(case: Case) -> Store:
    return case.store


async def collect(store: Store, prefix: str, after: int, enough: Callable[[list[Batch]], bool]) -> list[Batch]:
    got: list[Batch] = []
    async with asyncio.timeout(15):
        watching = store.watch(prefix, after)
        async for batch in watching:
            got.append(batch)
            if enough(got):
                break
        await watching.aclose()
    return got


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_put_get_delete_and_versions(store: Store):
    key = ROOT + "a"
    assert await store.get(key) is None
    first = await store.commit([Put(key, b"1")])
    second = await store.commit([Put(key, b"\x00\xff")])
    entry = await store.get(key)
    assert entry is not None
    assert first.applied
    assert second.revision == first.revision + 1
    assert (entry.value, entry.version, entry.created, entry.modified) == (
        b"\x00\xff",
        2,
        first.revision,
        second.revision,
    )
    await store.commit([Delete(key)])
    assert await store.get(key) is None
    await store.commit([Put(key, b"3")])
    again = await store.get(key)
    assert again is not None
    assert (again.version, again.created) == (1, second.revision + 2)


async def test_removing_what_is_not_there_moves_nothing(store: Store):
    before = await store.commit([Put(ROOT + "a", b"")])
    after = await store.commit([Delete(ROOT + "none")])
    assert after.applied
    assert after.revision == before.revision


async def test_listing_is_by_key_and_only_the_prefix(store: Store):
    for name in ("b/2", "b/10", "b", "bb", "a", "c", "b/é"):
        await store.commit([Put(ROOT + name, name.encode())])
    listing = await store.scan(ROOT + "b/")
    assert [entry.key for entry in listing.entries] == [ROOT + "b/10", ROOT + "b/2", ROOT + "b/é"]
    assert listing.revision >= max(entry.modified for entry in listing.entries)


async def test_condition_on_an_old_revision_changes_nothing(store: Store):
    key = ROOT + "a"
    made = await store.commit([Put(key, b"1")], [Unchanged(key, 0)])
    assert made.applied
    assert not (await store.commit([Put(key, b"2")], [Unchanged(key, 0)])).applied
    assert (await store.commit([Put(key, b"2")], [Unchanged(key, made.revision)])).applied
    lost = await store.commit([Put(key, b"3"), Put(ROOT + "b", b"3")], [Unchanged(key, made.revision)])
    assert not lost.applied
    assert await store.get(ROOT + "b") is None


async def test_racing_writers_lose_no_increment(store: Store):
    key = ROOT + "counter"

    async def add(times: int) -> None:
        for _ in range(times):
            while True:
                entry = await store.get(key)
                value, modified = (0, 0) if entry is None else (int(entry.value), entry.modified)
                if (await store.commit([Put(key, b"%d" % (value + 1))], [Unchanged(key, modified)])).applied:
                    break

    await asyncio.gather(*(add(8) for _ in range(6)))
    entry = await store.get(key)
    assert entry is not None
    assert (entry.value, entry.version) == (b"48", 48)


async def test_only_one_of_many_wins_a_new_key(store: Store):
    key = ROOT + "leader"
    done = await asyncio.gather(*(store.commit([Put(key, b"%d" % i)], [Unchanged(key, 0)]) for i in range(20)))
    assert sum(d.applied for d in done) == 1


async def test_watch_yields_every_commit_in_order_while_many_write(store: Store):
    start = (await store.scan(ROOT)).revision
    expected = 120

    async def write(writer: int) -> None:
        for i in range(expected // 4):
            await store.commit([Put(f"{ROOT}w/{writer}/{i}", b"x"), Put(f"{ROOT}other-{writer}", b"y")])

    watching = asyncio.create_task(collect(store, ROOT + "w/", start, lambda got: len(got) == expected))
    late = [asyncio.create_task(write(w)) for w in range(4)]
    batches = await watching
    await asyncio.gather(*late)
    revisions = [batch.revision for batch in batches]
    assert revisions == sorted(set(revisions))
    assert all(len(batch.changes) == 1 and batch.changes[0].key.startswith(ROOT + "w/") for batch in batches)
    assert len({batch.changes[0].key for batch in batches}) == expected
    middle = revisions[expected // 2]
    rest = await collect(store, ROOT + "w/", middle, lambda got: len(got) == expected - expected // 2 - 1)
    assert [b.revision for b in rest] == revisions[expected // 2 + 1 :]


async def test_watch_shows_removal_and_whole_commits(store: Store):
    start = (await store.commit([Put(ROOT + "a", b"1"), Put(ROOT + "b", b"1")])).revision
    await store.commit([Delete(ROOT + "a"), Put(ROOT + "b", b"2")])
    (batch,) = await collect(store, ROOT, start, lambda got: True)
    assert batch.revision == start + 1
    changes = {change.key: change.entry for change in batch.changes}
    assert changes[ROOT + "a"] is None
    changed = changes[ROOT + "b"]
    assert changed is not None
    assert (changed.value, changed.version) == (b"2", 2)


async def test_lease_that_is_not_renewed_takes_its_keys_in_one_commit(case: Case):
    store = case.store
    kept = await store.grant(3600)
    lease = await store.grant(case.min_lease_s)
    assert lease.ttl_s >= case.min_lease_s
    await store.commit([Put(ROOT + "a", b"", lease.id), Put(ROOT + "b", b"", lease.id)])
    made = await store.commit([Put(ROOT + "c", b"", kept.id), Put(ROOT + "d", b"")])
    (batch,) = await collect(store, ROOT, made.revision, lambda got: True)
    assert {change.key for change in batch.changes} == {ROOT + "a", ROOT + "b"}
    assert [entry.key for entry in (await store.scan(ROOT)).entries] == [ROOT + "c", ROOT + "d"]
    with pytest.raises(LeaseLostError):
        await store.keep_alive(lease.id)
    with pytest.raises(LeaseLostError):
        await store.commit([Put(ROOT + "e", b"", lease.id)])
    assert await store.get(ROOT + "e") is None


async def test_renewed_lease_holds(case: Case):
    store = case.store
    lease = await store.grant(1.0)
    await store.commit([Put(ROOT + "a", b"", lease.id)])
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + 1.5 * lease.ttl_s
    while loop.time() < ends_s:
        assert await store.keep_alive(lease.id) > 0
        await asyncio.sleep(lease.ttl_s / 5)
    assert await store.get(ROOT + "a") is not None


async def test_revoked_lease_and_a_key_put_elsewhere(store: Store):
    first, second = await store.grant(60), await store.grant(60)
    await store.commit([Put(ROOT + "moved", b"", first.id), Put(ROOT + "gone", b"", first.id)])
    await store.commit([Put(ROOT + "moved", b"", second.id)])
    await store.revoke(first.id)
    await store.revoke(first.id)
    assert [entry.key for entry in (await store.scan(ROOT)).entries] == [ROOT + "moved"]
    await store.commit([Put(ROOT + "moved", b"")])
    await store.revoke(second.id)
    entry = await store.get(ROOT + "moved")
    assert entry is not None
    assert entry.lease == 0


async def test_restart_loses_nothing_and_the_watch_goes_on(case: Case):
    store = case.store
    lease = await store.grant(60)
    start = (await store.scan(ROOT)).revision
    await store.commit([Put(ROOT + "a", b"1", lease.id)])
    before = await store.commit([Put(ROOT + "b", b"2")])
    await case.restart()
    async with asyncio.timeout(10):
        while True:
            try:
                listing = await store.scan(ROOT)
                break
            except StoreError:
                await asyncio.sleep(0.05)
    assert [(e.key, e.value, e.lease) for e in listing.entries] == [
        (ROOT + "a", b"1", lease.id),
        (ROOT + "b", b"2", 0),
    ]
    assert await store.keep_alive(lease.id) > 0
    after = await store.commit([Put(ROOT + "c", b"3")])
    assert after.revision == before.revision + 1
    batches = await collect(store, ROOT, start, lambda got: len(got) == 3)
    assert [batch.changes[0].key for batch in batches] == [ROOT + "a", ROOT + "b", ROOT + "c"]


async def test_mirror_lives_through_a_restart(case: Case):
    store = case.store
    await store.commit([Put(ROOT + "a", b"1")])
    seen: list[tuple[str, ...]] = []
    mirror = Mirror(store, ROOT, on_change=lambda: seen.append(tuple(e.key for e in mirror.entries())))
    async with mirror:
        await mirror.wait_known()
        await case.restart()
        async with asyncio.timeout(15):
            while True:
                with contextlib.suppress(StoreError):
                    await store.commit([Put(ROOT + "b", b"2")])
                    break
                await asyncio.sleep(0.05)
        await until(lambda: mirror.get(ROOT + "b") is not None and mirror.stale_s == 0)
    assert all(ROOT + "a" in keys for keys in seen)


async def test_what_cannot_be_done_is_refused(store: Store):
    for operations in (
        [Put(ROOT + "a", b""), Delete(ROOT + "a")],
        [Put("", b"")],
        [Put(ROOT + "a\n", b"")],
        [Put(ROOT + "a", b"x" * (1024 * 1024 + 1))],
        [Put(f"{ROOT}{i}", b"") for i in range(101)],
    ):
        with pytest.raises(InvalidRequestError):
            await store.commit(operations)


async def test_watch_from_a_future_of_another_life_is_told(store: Store):
    revision = (await store.scan(ROOT)).revision
    with pytest.raises(CompactedError):
        await collect(store, ROOT, revision + 1000, lambda got: True)


async def test_model_of_random_steps(store: Store):
    """Any sequence of conditional commits gives the state a plain dictionary gives."""
    rng = random.Random(7)
    model: dict[str, tuple[bytes, int]] = {}
    for step in range(60):
        keys = rng.sample([f"{ROOT}{c}" for c in "abcde"], rng.randint(1, 3))
        operations = [Put(k, b"%d" % step) if rng.random() < 0.7 else Delete(k) for k in keys]
        guessed = rng.choice(keys)
        modified = model[guessed][1] if guessed in model and rng.random() < 0.8 else rng.choice([0, 1])
        done = await store.commit(operations, [Unchanged(guessed, modified)])
        assert done.applied == ((model[guessed][1] if guessed in model else 0) == modified)
        if done.applied:
            for operation in operations:
                if isinstance(operation, Put):
                    model[operation.key] = (operation.value, done.revision)
                else:
                    model.pop(operation.key, None)
    listing = await store.scan(ROOT)
    assert {e.key: (e.value, e.modified) for e in listing.entries} == model
