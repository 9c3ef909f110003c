"""`farfill gateway --workers 3` as real processes: one port, one dies alone, all drain, reload and follow as one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
import yaml
from tests.system.cluster import DECODE, PREFILL, Cluster, local_plan
from tests.system.models import write_full_attention

from farfill.config.secrets import read_tls
from farfill.registry.identity import registry_context
from farfill.registry.remote import RemoteStore
from farfill.registry.rollouts import revert_all

COUNT = 3
DEADLINE_S = 60.0
REVERT_S = 1.0
_SAMPLE = re.compile(r'^(?P<name>\w+)\{process="(?P<process>\w+)"(?P<labels>[^}]*)\} (?P<value>\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("processes")
    found = Cluster(local_plan(write_full_attention(folder / "model"), "full"), folder)
    try:
        for name in ("registry", DECODE, PREFILL):
            found.spawn(name)
        found.spawn("gateway", options=["--workers", str(COUNT)])
        found.wait_known({DECODE, PREFILL})
        yield found
    finally:
        statuses = found.stop_all()
    assert set(statuses.values()) <= {0}, f"exit statuses {statuses}"


async def _samples(http: aiohttp.ClientSession, url: str, name: str) -> dict[str, float]:
    """The sum of `name` by process."""
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found: dict[str, float] = {}
    for match in _SAMPLE.finditer(text):
        if match["name"] == name:
            found[match["process"]] = found.get(match["process"], 0.0) + float(match["value"])
    return found


async def _until(
    http: aiohttp.ClientSession, url: str, name: str, fits: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await _samples(http, url, name)
            if fits(found):
                return found
            await asyncio.sleep(0.05)


def _all(value: float) -> Callable[[dict[str, float]], bool]:
    return lambda found: list(found.values()) == [value] * COUNT


class _Stream:
    """One long stream on a connection of its own."""

    def __init__(self, http: aiohttp.ClientSession, url: str, max_tokens: int) -> None:
        self.events = 0
        self.last = b""
        self.broken = False
        self.begun = asyncio.Event()
        self.reading = asyncio.create_task(self._read(http, url, max_tokens))

    async def _read(self, http: aiohttp.ClientSession, url: str, max_tokens: int) -> None:
        body = {"model": "full", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        try:
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        self.events, self.last = self.events + 1, line.strip()
                        self.begun.set()
        except aiohttp.ClientError:
            self.broken = True
            self.begun.set()


async def test_all_processes_serve_and_tell_their_metrics_as_one(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        await _until(http, cluster.url, "farfill_gateway_process_up", _all(1))
        async with asyncio.timeout(DEADLINE_S):
            served: dict[str, float] = {}
            while sum(1 for value in served.values() if value) < COUNT:
                body = {"model": "full", "prompt": "hi", "max_tokens": 1}
                async with http.post(f"{cluster.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                served = await _samples(http, cluster.url, "farfill_request_seconds_count")
        assert set(served) == {"0", "1", "2"}
        assert await _samples(http, cluster.url, "farfill_gateway_process_restarts_total") == {"supervisor": 0}


async def test_killed_process_loses_only_its_own_streams_and_comes_back(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as http:
        streams = [_Stream(http, cluster.url, 4000) for _ in range(8)]
        try:
            await asyncio.gather(*(stream.begun.wait() for stream in streams))
            running = await _samples(http, cluster.url, "farfill_requests_in_flight")
            victim = max(running, key=lambda process: running[process])
            assert running[victim] > 0
            assert sum(running.values()) == len(streams)
            pids = {str(e["process"]): e["pid"] for e in cluster.events("gateway", "gateway_process_started")}
            os.kill(pids[victim], signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                while sum(stream.broken for stream in streams) < running[victim]:
                    await asyncio.sleep(0.02)
                alive = [stream for stream in streams if not stream.broken]
                before = [stream.events for stream in alive]
                while any(stream.events == events for stream, events in zip(alive, before, strict=True)):
                    await asyncio.sleep(0.02)
            assert sum(stream.broken for stream in streams) == running[victim]
            await _until(http, cluster.url, "farfill_gateway_process_up", _all(1))
            restarts = await _samples(http, cluster.url, "farfill_gateway_process_restarts_total")
            assert restarts == {"supervisor": 1}
            (ended,) = cluster.events("gateway", "gateway_process_ended")
            assert (str(ended["process"]), ended["status"]) == (victim, -signal.SIGKILL)
        finally:
            for stream in streams:
                stream.reading.cancel()
            await asyncio.gather(*(stream.reading for stream in streams), return_exceptions=True)


async def test_reload_reaches_all_processes(cluster: Cluster) -> None:
    values: dict[str, Any] = yaml.safe_load(cluster.config_path.read_text())
    values["routing"]["remote_prefill_threshold_tokens"] = 12_345
    cluster.config_path.write_text(yaml.safe_dump(values, sort_keys=False))
    cluster.signal("gateway", signal.SIGHUP)
    async with aiohttp.ClientSession() as http:
        await _until(http, cluster.url, "farfill_threshold_tokens", _all(12_345))


async def test_revert_reaches_all_processes_within_a_second(cluster: Cluster) -> None:
    loaded = cluster.loaded
    tls = read_tls(loaded, "gateway")
    context = registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, loaded.config.cluster)
    async with (
        aiohttp.ClientSession() as http,
        RemoteStore(f"https://{loaded.config.registry.listen}", context) as store,
    ):
        # A process that has heard of no share shows none; of one that it has, what it applies.
        await revert_all(store, "test", "first", time.time())
        await _until(http, cluster.url, "farfill_rollout_percent", _all(0))
        command = [sys.executable, "-m", "farfill.cli.main", "rollout", "set", "100%"]
        command += ["--config", str(cluster.config_path)]
        await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=DEADLINE_S)
        await _until(http, cluster.url, "farfill_rollout_percent", _all(100))
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_until(http, cluster.url, "farfill_rollout_percent", _all(0)))
            began_s = time.monotonic()
            await revert_all(store, "test", "too slow", time.time())
            await watching
            took_s = time.monotonic() - began_s
    print(f"revert was in all processes after {took_s:.3f} s")
    assert took_s < REVERT_S


async def test_sigterm_drains_all_processes(cluster: Cluster) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as http:
        streams = [_Stream(http, cluster.url, 60) for _ in range(6)]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        assert await asyncio.to_thread(cluster.stop, "gateway") == 0
        await asyncio.gather(*(stream.reading for stream in streams))
        assert [stream.last for stream in streams] == [b"data: [DONE]"] * 6
        assert not any(stream.broken for stream in streams)
