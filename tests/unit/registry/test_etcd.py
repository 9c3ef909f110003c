"""What is particular to etcd: logins, lost endpoints, cut history, foreign keys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from farfill.cli.pki import create_pki, members_of
from farfill.cli.registry import serve_registry
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import read_tls
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.registry.client import POLL_WAIT_S, Announcer, InstanceWatcher
from farfill.registry.etcd import EtcdStore
from farfill.registry.etcd_calls import EtcdCalls
from farfill.registry.identity import registry_context
from farfill.registry.mirror import Mirror
from farfill.registry.store import CompactedError, Put, StoreError
from farfill.transport.tls import client_context
from support.etcd import PASSWORD, PREFIX, USER, EtcdServer
from support.pki import make_pki

INSTANCE = Instance(
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


@pytest.fixture
def dead_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    return f"https://localhost:{port}"


async def test_wrong_password_is_told(etcd: EtcdServer):
    async with etcd.store("p/", password="wrong") as store:
        with pytest.raises(StoreError, match="authentication failed") as caught:
            await store.get("a")
    assert not caught.value.retryable


async def test_keys_of_others_are_out_of_reach(etcd: EtcdServer):
    async with EtcdStore(etcd.store("").calls, "/other/") as store:
        with pytest.raises(StoreError, match="permission denied"):
            await store.commit([Put("a", b"")])


async def test_server_of_another_ca_is_refused(etcd: EtcdServer, tmp_path):
    foreign = make_pki(tmp_path / "foreign").without_common_name("client")
    context = client_context(*foreign.pems, check_hostname=True)
    async with EtcdStore(EtcdCalls((etcd.url,), context), PREFIX) as store:
        with pytest.raises(StoreError, match="certificate verify failed") as caught:
            await store.get("a")
    assert caught.value.reason == "unreachable"


async def test_client_certificate_with_a_common_name_names_the_fix(etcd: EtcdServer):
    context = client_context(*etcd.pki.name("named").pems, check_hostname=True)
    async with EtcdStore(EtcdCalls((etcd.url,), context, "farfill", "x"), PREFIX) as store:
        with pytest.raises(StoreError, match=r"make registry.etcd.cert without one"):
            await store.get("a")


async def test_next_endpoint_serves_when_the_first_is_dead(etcd: EtcdServer, dead_url: str):
    calls = etcd.store("").calls
    async with EtcdStore(
        EtcdCalls((dead_url, etcd.url), calls.ssl_context, "farfill", calls.password), PREFIX
    ) as store:
        await store.commit([Put("failover/a", b"1")])
        assert await store.get("failover/a") is not None


async def test_all_endpoints_dead_is_unreachable(dead_url: str, etcd: EtcdServer):
    async with EtcdStore(EtcdCalls((dead_url,), etcd.context()), PREFIX) as store:
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            await store.get("a")
    assert (caught.value.reason, caught.value.retryable) == ("unreachable", True)


async def test_token_that_ran_out_is_renewed(etcd: EtcdServer):
    async with etcd.store("token/") as store:
        await store.commit([Put("a", b"")])
        store.calls._token = "stale.1"
        assert await store.get("a") is not None


async def test_calls_at_once_log_in_once(etcd: EtcdServer):
    async with etcd.store("login/") as store:
        paths: list[str] = []
        post = store.calls._post

        def counted(path, body):
            paths.append(path)
            return post(path, body)

        store.calls._post = counted
        await asyncio.gather(*(store.get("a") for _ in range(10)))
        assert paths.count("/v3/auth/authenticate") == 1
        store.calls._token = "stale.1"
        await asyncio.gather(*(store.get("a") for _ in range(10)))
        assert paths.count("/v3/auth/authenticate") == 2


async def test_cut_history_is_told_and_a_mirror_lists_again(etcd: EtcdServer):
    async with etcd.store("cut/") as store:
        start = (await store.commit([Put("a", b"1")])).revision
        await store.commit([Put("b", b"2")])
        last = await store.commit([Put("a", b"3")])
        await asyncio.to_thread(etcd.compact, last.revision)
        with pytest.raises(CompactedError) as caught:
            async for _ in store.watch("", start):
                pass
        assert caught.value.revision == last.revision
        mirror = Mirror(store, "")
        mirror.revision = start
        async with mirror:
            await mirror.wait_known()
            assert [(e.key, e.value) for e in mirror.entries()] == [("a", b"3"), ("b", b"2")]


async def test_quiet_watch_is_begun_again_without_loss(etcd: EtcdServer):
    store = EtcdStore(etcd.store("").calls, PREFIX + "quiet/", quiet_s=0.1)
    async with store:
        start = (await store.scan("")).revision

        async def later() -> None:
            for name in "abc":
                await asyncio.sleep(0.25)  # longer than the watch stays on a silent stream
                await store.commit([Put(name, b"")])

        writing = asyncio.create_task(later())
        keys: list[str] = []
        async with asyncio.timeout(10):
            async for batch in store.watch("", start):
                keys += [change.key for change in batch.changes]
                if len(keys) == 3:
                    break
        await writing
    assert keys == ["a", "b", "c"]


async def test_long_listing_comes_in_pages(etcd: EtcdServer):
    async with etcd.store("pages/") as store:
        for start in range(0, 1100, 100):
            await store.commit([Put(f"k{i:05d}", b"") for i in range(start, start + 100)])
        listing = await store.scan("k")
        assert [entry.key for entry in listing.entries] == [f"k{i:05d}" for i in range(1100)]


@contextlib.asynccontextmanager
async def registry_on(etcd: EtcdServer, cluster_file: Path) -> AsyncIterator[tuple[LoadedConfig, str]]:
    """The whole of `farfill registry` with `store: etcd`, from the cluster file on; its URL."""
    folder = cluster_file.parent
    (folder / "password").write_text(PASSWORD + "\n")
    (folder / "password").chmod(0o600)
    for name, data in zip(("cert", "key", "ca"), etcd.client.pems, strict=True):
        (folder / f"etcd-{name}.pem").write_bytes(data)
        (folder / f"etcd-{name}.pem").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    cluster_file.write_text(
        cluster_file.read_text().replace(
            "registry:\n",
            f"registry:\n  listen: 127.0.0.1:{port}\n  lease_s: 1\n  store: etcd\n  etcd:\n"
            f"    endpoints: ['{etcd.url}']\n"
            "    ca: file:etcd-ca.pem\n    cert: file:etcd-cert.pem\n    key: file:etcd-key.pem\n"
            f"    user: {USER}\n    password: file:password\n",
        )
    )
    loaded = load_config(cluster_file)
    create_pki(folder / "pki", members_of(loaded.config), days=1)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_registry(loaded, stop))
    try:
        yield loaded, f"https://127.0.0.1:{port}"
    finally:
        stop.set()
        await serving


class Heard:
    """What the observer of a registry client heard last, as the gauge of it shows."""

    outcome = ""

    def registry_answered(self, outcome: str) -> None:
        self.outcome = outcome


@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_watchers_hear_within_about_a_lease_that_etcd_is_away(etcd: EtcdServer, cluster_file: Path, how: str):
    heard = Heard()
    async with (
        registry_on(etcd, cluster_file) as (loaded, url),
        InstanceWatcher(registry_url=url, ssl_context=as_role(loaded, "gateway"), observer=heard) as watcher,
    ):
        await until(lambda: watcher.known)
        assert (watcher.stale_s, heard.outcome) == (0.0, "ok")
        await asyncio.to_thread(etcd.kill if how == "killed" else etcd.pause)
        try:
            await until(lambda: watcher.stale_s > 0, within_s=POLL_WAIT_S / 2)
            assert heard.outcome == "store_unavailable"
        finally:
            await asyncio.to_thread(etcd.start if how == "killed" else etcd.resume)
        await until(lambda: watcher.stale_s == 0, within_s=POLL_WAIT_S / 2)
        assert heard.outcome == "ok"


async def test_registry_process_runs_on_etcd(etcd: EtcdServer, cluster_file: Path):
    async with registry_on(etcd, cluster_file) as (loaded, url):
        await follow_a_worker(etcd, loaded, url)


async def follow_a_worker(etcd: EtcdServer, loaded: LoadedConfig, url: str) -> None:
    worker = dataclasses.replace(INSTANCE, name="decode-near")
    watcher = InstanceWatcher(registry_url=url, ssl_context=as_role(loaded, "gateway"))
    announcer = Announcer(registry_url=url, ssl_context=as_role(loaded, "decode-near"), instance=worker)
    async with watcher:
        async with announcer:
            await until(lambda: watcher.instances() == (worker,))
            await announcer.announce(queued_tokens=5)
            await until(lambda: [i.queued_tokens for i in watcher.instances()] == [5])
            etcd.kill()
            await announcer.announce(queued_tokens=6)
            assert len(watcher.instances()) == 1
            await asyncio.to_thread(etcd.start)
            await until(lambda: [i.queued_tokens for i in watcher.instances()] == [6])
        await until(lambda: watcher.instances() == ())


def as_role(loaded: LoadedConfig, name: str) -> ssl.SSLContext:
    tls = read_tls(loaded, name)
    return registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, loaded.config.cluster)


async def until(condition: Callable[[], bool], within_s: float = 20) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
