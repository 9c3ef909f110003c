"""The registry as a process of its own: killed while it writes, nothing it had acknowledged is lost."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from farfill.cli.local_ports import free_ports
from farfill.cli.pki import create_pki, members_of
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import read_tls
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.registry.client import Announcer, InstanceWatcher
from farfill.registry.identity import registry_context
from farfill.registry.remote import RemoteStore
from farfill.registry.store import Put, StoreError, Unchanged

DECODE = Instance(
    name="decode-near",
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


class RegistryProcess:
    """`farfill registry` of one cluster file."""

    def __init__(self, cluster_file: Path) -> None:
        (self.port,) = free_ports(1)
        text = cluster_file.read_text()
        cluster_file.write_text(
            text.replace("registry:\n", f"registry:\n  listen: 127.0.0.1:{self.port}\n  lease_s: 3\n")
        )
        self._file = cluster_file
        self.loaded: LoadedConfig = load_config(cluster_file)
        create_pki(cluster_file.parent / "pki", members_of(self.loaded.config), days=1)
        self.url = f"https://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._file.parent / "registry.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "farfill.cli.main", "registry", "--config", str(self._file)], stderr=log
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def context(self, name: str) -> ssl.SSLContext:
        tls = read_tls(self.loaded, name)
        return registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, self.loaded.config.cluster)


@pytest.fixture
def registry(cluster_file: Path):
    process = RegistryProcess(cluster_file)
    yield process
    process.kill()


async def test_killed_while_writing_it_keeps_what_it_acknowledged_and_its_workers(registry: RegistryProcess):
    registry.start()
    acknowledged = 0
    seen: list[int] = []
    watcher = InstanceWatcher(
        registry_url=registry.url,
        ssl_context=registry.context("gateway"),
        on_change=lambda instances: seen.append(len(instances)),
    )
    announcer = Announcer(registry_url=registry.url, ssl_context=registry.context("decode-near"), instance=DECODE)
    async with watcher, announcer, RemoteStore(registry.url, registry.context("gateway")) as store:
        async with asyncio.timeout(60):
            while not watcher.instances():
                await asyncio.sleep(0.02)

            async def write() -> None:
                """Counts up with compare-and-swap; a call that failed may have been done all the same."""
                nonlocal acknowledged
                while True:
                    try:
                        entry = await store.get("config/counter")
                        value, modified = (0, 0) if entry is None else (int(entry.value), entry.modified)
                        assert value >= acknowledged, "an acknowledged write was lost"
                        put = Put("config/counter", b"%d" % (value + 1))
                        if (await store.commit([put], [Unchanged(put.key, modified)])).applied:
                            acknowledged = value + 1
                    except StoreError:
                        await asyncio.sleep(0.02)

            writing = asyncio.create_task(write())
            for _ in range(2):
                goal = acknowledged + 25
                while acknowledged < goal:
                    await asyncio.sleep(0.01)
                    if writing.done():
                        writing.result()
                registry.kill()
                assert watcher.instances() == (DECODE,)
                registry.start()
            goal = acknowledged + 5
            while acknowledged < goal or watcher.stale_s > 0:
                await asyncio.sleep(0.01)
            writing.cancel()
        assert watcher.instances() == (DECODE,)
        assert 0 not in seen[seen.index(1) :], "a restart made the cluster look empty"
