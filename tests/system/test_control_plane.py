"""Three gateways and one registry as real processes: shares change everywhere within a second, and what holds the state
may be killed under load."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster, local_plan
from tests.system.models import write_full_attention

from farfill.cli.local_ports import HOST, free_ports
from farfill.config.secrets import read_tls
from farfill.registry.identity import registry_context
from farfill.registry.remote import RemoteStore
from farfill.registry.rollouts import revert_all
from support.etcd import EtcdServer

GATEWAYS = ("gateway", "gateway-1", "gateway-2")
REVERT_S = 1.0
DEADLINE_S = 60.0


class ControlPlane:
    """A cluster whose gateways are three, and the etcd behind its registry, if any."""

    def __init__(self, cluster: Cluster, etcd: EtcdServer | None) -> None:
        self.cluster = cluster
        self.etcd = etcd
        self.urls = [cluster.url]
        for name in GATEWAYS[1:]:
            (port,) = free_ports(1)
            config = cluster.write_config(f"{name}.yaml", {"gateway": {"listen": f"{HOST}:{port}"}})
            cluster.spawn(name, config=config, role="gateway")
            self.urls.append(f"http://{HOST}:{port}")
        for url in self.urls:
            cluster.wait_known({DECODE, PREFILL}, url=url)

    def farfill(self, *arguments: str) -> str:
        """The output of a command of the operator."""
        command = [sys.executable, "-m", "farfill.cli.main", *arguments, "--config", str(self.cluster.config_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout

    def store(self) -> RemoteStore:
        """The registry's store, as the gateways see it."""
        loaded = self.cluster.loaded
        tls = read_tls(loaded, "gateway")
        context = registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, loaded.config.cluster)
        return RemoteStore(f"https://{loaded.config.registry.listen}", context)

    def kill_state(self) -> None:
        """What holds the state loses power."""
        if self.etcd is not None:
            self.etcd.kill()
        else:
            self.cluster.kill("registry")

    def start_state(self) -> None:
        """And is back."""
        if self.etcd is not None:
            self.etcd.start()
        else:
            self.cluster.spawn("registry")


@pytest.fixture(scope="module", params=["embedded", "etcd"])
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("plane")
    with _etcd(folder, wanted=request.param == "etcd") as (etcd, registry):
        plan = local_plan(write_full_attention(folder / "model"), "full", overrides={"registry": registry})
        cluster = Cluster(plan, folder)
        try:
            cluster.start()
            yield ControlPlane(cluster, etcd)
        finally:
            statuses = cluster.stop_all()
    assert set(statuses.values()) <= {0}, f"exit statuses {statuses}"


@contextmanager
def _etcd(folder: Path, *, wanted: bool) -> Iterator[tuple[EtcdServer | None, dict[str, Any]]]:
    """A running etcd, if `wanted`, and what the registry's section says of it."""
    if not wanted:
        yield None, {"lease_s": 2.0}
        return
    (folder / "etcd").mkdir()
    etcd = EtcdServer(folder / "etcd")
    etcd.start()
    try:
        etcd.enable_auth()
        yield etcd, {"lease_s": 3.0, **etcd.registry_section()}
    finally:
        etcd.kill()


async def _shares(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/v1/farfill/rollout") as answer:
        return await answer.json()


async def _until(http: aiohttp.ClientSession, urls: list[str], holds: Callable[[dict[str, Any]], bool]) -> float:
    """Seconds until the rollout page of each gateway is as wanted."""
    began_s = time.monotonic()
    left = set(urls)
    async with asyncio.timeout(DEADLINE_S):
        while left:
            for url in tuple(left):
                if holds(await _shares(http, url)):
                    left.remove(url)
            await asyncio.sleep(0.01)
    return time.monotonic() - began_s


def _percent(percent: float) -> Callable[[dict[str, Any]], bool]:
    return lambda page: [share["percent"] for share in page["shares"]] == [percent]


async def _complete(http: aiohttp.ClientSession, url: str, number: int) -> tuple[int, str]:
    """(status, reason) of a prompt of some 400 tokens that no cache knows."""
    body = {"model": "full", "prompt": f"{number:06} " * 60, "max_tokens": 2}
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status, answer.headers.get("x-farfill-reason", "")


async def test_revert_is_everywhere_within_a_second(plane: ControlPlane) -> None:
    assert "100 %" in await asyncio.to_thread(plane.farfill, "rollout", "set", "100%", "--reason", "begin")
    async with aiohttp.ClientSession() as http, plane.store() as store:
        await _until(http, plane.urls, _percent(100))
        assert {await _complete(http, url, i) for i, url in enumerate(plane.urls)} == {(200, "above_threshold")}
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_until(http, plane.urls, _percent(0)))
            await asyncio.sleep(0)
            await revert_all(store, "test", "too slow", time.time())
        took_s = watching.result()
        print(f"revert was everywhere after {took_s:.3f} s")
        assert took_s < REVERT_S
        assert {await _complete(http, url, 10 + i) for i, url in enumerate(plane.urls)} == {(200, "rollout")}
        assert "too slow" in await asyncio.to_thread(plane.farfill, "rollout", "show")
        await asyncio.to_thread(plane.farfill, "rollout", "set", "100%")
        await _until(http, plane.urls, _percent(100))


async def test_gateways_serve_what_they_knew_while_the_state_is_gone(plane: ControlPlane) -> None:
    seen: Counter[tuple[int, str]] = Counter()
    stop = asyncio.Event()

    async def load(http: aiohttp.ClientSession, index: int) -> None:
        number = 1000 * (index + 1)
        while not stop.is_set():
            number += 1
            seen[await _complete(http, plane.urls[index], number)] += 1

    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for index in range(len(plane.urls)):
            group.create_task(load(http, index))
        try:
            await asyncio.to_thread(plane.kill_state)
            await _until(http, plane.urls, lambda page: page["registry"].startswith("away"))
            before = seen.total()
            async with asyncio.timeout(DEADLINE_S):
                while seen.total() < before + 12:  # served while it is gone
                    await asyncio.sleep(0.02)
            assert [s["percent"] for s in (await _shares(http, plane.urls[0]))["shares"]] == [100]
            await asyncio.to_thread(plane.start_state)
            await _until(http, plane.urls, lambda page: page["registry"] == "ok")
            before = seen.total()
            async with asyncio.timeout(DEADLINE_S):
                while seen.total() < before + 6:
                    await asyncio.sleep(0.02)
        finally:
            stop.set()
    assert set(seen) == {(200, "above_threshold")}, seen
    # And what changes now is heard again.
    await asyncio.to_thread(plane.farfill, "rollout", "set", "50%", "--sticky", "request")
    async with aiohttp.ClientSession() as http:
        await _until(http, plane.urls, _percent(50))


async def test_killed_gateway_loses_only_its_own_streams(plane: ControlPlane) -> None:
    async with aiohttp.ClientSession() as http:
        await asyncio.to_thread(plane.cluster.kill, "gateway-2")
        assert {(await _complete(http, url, 90_000 + i))[0] for i, url in enumerate(plane.urls[:2])} == {200}
        config = plane.cluster.folder / "gateway-2.yaml"
        await asyncio.to_thread(plane.cluster.spawn, "gateway-2", config=config, role="gateway")
        await asyncio.to_thread(plane.cluster.wait_known, {DECODE, PREFILL}, url=plane.urls[2])
        await _until(http, plane.urls[2:], _percent(50))
        assert (await _complete(http, plane.urls[2], 90_010))[0] == 200
