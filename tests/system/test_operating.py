"""What an operator does, on real processes: look at a request and the cluster, move to a new worker version, change the
configuration; evictions seen in time, and a prompt that kills workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests.system.cluster import DECODE, PREFILL, Cluster, local_plan
from tests.system.models import write_full_attention

from farfill.cli.local_ports import HOST, free_ports
from farfill.verify.client import Answer, GatewayClient, GatewayRefusedError, Generation
from farfill.verify.prompts import load_corpus
from farfill.verify.scrape import wait_until

DEADLY_PROMPT = [7] * 300
NEW_DECODE, NEW_PREFILL = "decode-new", "prefill-new"
OTHER_GATEWAY = "gateway-1"
NEW = "2026-12"
DEADLINE_S = 180.0
SEEN_S = 1.0
DEADLY = Path(__file__).parent / "faults" / "deadly"


class Site:
    """A cluster with two gateways; workers of a new version stand in its file and are started by the tests."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(4)
        new = {
            NEW_PREFILL: {"role": "prefill", "site": "far", "listen": f"{HOST}:{ports[0]}", "version": NEW},
            NEW_DECODE: {
                "role": "decode",
                "site": "near",
                "listen": f"{HOST}:{ports[1]}",
                "transfer_listen": f"{HOST}:{ports[2]}",
                "version": NEW,
            },
        }
        # 1 MiB of prefixes are about a thousand tokens.
        overrides = {"workers": new, "engine": {"prefix_cache_mb": 1}}
        plan = local_plan(write_full_attention(folder / "model"), "full", overrides=overrides)
        self.cluster = Cluster(plan, folder)
        self._other = ports[3]
        self.other_url = f"http://{HOST}:{self._other}"

    def begin(self) -> None:
        """Start all but the new workers."""
        for name in ("registry", "gateway"):
            self.cluster.spawn(name)
        self.start(DECODE, PREFILL)
        other = self.cluster.write_config("other.yaml", {"gateway": {"listen": f"{HOST}:{self._other}"}})
        self.cluster.spawn(OTHER_GATEWAY, config=other, role="gateway")
        self.wait_known(DECODE, PREFILL)

    def start(self, *names: str) -> None:
        """Start workers, which die of a deadly prompt."""
        path = os.pathsep.join([str(DEADLY), *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in names:
            self.cluster.spawn(name, environment={"PYTHONPATH": path})

    def wait_known(self, *names: str) -> None:
        """Until both gateways know exactly these."""
        for url in (self.cluster.url, self.other_url):
            self.cluster.wait_known(set(names), url=url)

    def farfill(self, *arguments: str, fails: bool = False) -> str:
        """What a command of the operator printed."""
        command = [sys.executable, "-m", "farfill.cli.main", *arguments, "--config", str(self.cluster.config_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[GatewayClient, GatewayClient]]:
        async with AsyncExitStack() as stack:
            urls = (self.cluster.url, self.other_url)
            one, other = [await stack.enter_async_context(self.cluster.client(url=url)) for url in urls]
            yield one, other


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    started = Site(tmp_path_factory.mktemp("operating"))
    try:
        started.begin()
        yield started
    finally:
        statuses = started.cluster.stop_all()
    assert set(statuses.values()) <= {0}, f"exit statuses {statuses}"


async def ask(client: GatewayClient, tokens: int, variant: int, **more: Any) -> Answer:
    prompt = (await load_corpus(client)).prompt_of(tokens, variant=variant)
    return await client.complete(Generation(prompt=prompt, max_tokens=2, salt="operating", **more))


async def until(holds: Callable[[], bool], what: str) -> None:
    await wait_until(holds, what, DEADLINE_S)


async def test_evictions_are_known_within_a_second_where_history_would_go_on_believing(site: Site) -> None:
    async with site.clients() as (client, _):
        first = await ask(client, 400, 1, forced="local")
        again = await ask(client, 400, 1, forced="local")
        record = await client.record(again.request_id)
        assert record.expected_hit_tokens == record.cached_tokens == 384, first.request_id
        for variant in range(2, 8):
            await ask(client, 500, variant, forced="local")
        began_s = time.monotonic()
        await asyncio.sleep(0.2)
        last = await ask(client, 400, 1, forced="local")
        assert time.monotonic() - began_s < SEEN_S + DEADLINE_S
        record = await client.record(last.request_id)
        # Nothing of it is there any more, and the gateway, which sent it there twice, knows.
        assert record.expected_hit_tokens == record.cached_tokens == 0
        samples = await metrics(site.cluster.url)
    assert 'farfill_prefix_exact_workers{role="gateway",site="near"} 2.0' in samples
    error = [line for line in samples.splitlines() if line.startswith("farfill_prefix_error_tokens_total")]
    over = [line for line in error if 'direction="over"' in line and 'source="exact"' in line]
    assert [line.rpartition(" ")[2] for line in over] == ["0.0"]


async def metrics(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        return await answer.text()


async def test_explain_finds_the_request_and_every_worker_logged_its_id(site: Site) -> None:
    async with site.clients() as (_, other):
        answer = await ask(other, 600, 20)
    assert answer.placement == "remote"
    told = site.farfill("explain", answer.request_id)
    for step in ("tokenize", "queue", "placement", "prefill queue", "prefill", "transfer", "KV arrived",
                 "import and first token", "first token", "decode", "ended", "least_work", "offload"):  # fmt: skip
        assert step in told, told
    life = json.loads(site.farfill("explain", answer.request_id, "--json"))
    assert life["state"] == "ok"
    assert life["record"]["decisions"][0]["inputs"]["candidates"]
    for worker, event in ((PREFILL, "prefill_served"), (DECODE, "decode_served")):
        await until(
            lambda worker=worker, event=event: any(
                line["request_id"] == answer.request_id for line in site.cluster.events(worker, event)
            ),
            f"{event} logged",
        )
    assert "no gateway has a request" in site.farfill("explain", "unheard-of", fails=True)


def test_top_shows_instances_gateways_links_and_rates(site: Site) -> None:
    shown = site.farfill("top", "--once")
    for word in (DECODE, PREFILL, "far → near", "TTFT p50", "closed", "no rollout"):
        assert word in shown, shown
    seen = json.loads(site.farfill("top", "--json"))
    assert {i["name"] for i in seen["instances"]} == {DECODE, PREFILL}
    assert len(seen["gateways"]) == 2
    assert {"requests_per_s", "ttft_p95_s"} <= set(seen["gateways"][0]["traffic"])


async def test_configuration_is_followed_by_all_gateways_and_taken_back(site: Site) -> None:
    first = site.cluster.config_path
    site.farfill("config", "apply", str(first), "--reason", "as it is")
    values = yaml.safe_load(first.read_text())
    values["routing"]["remote_prefill_threshold_tokens"] = 50_000
    values["kv_transfer"]["retry"] = 5
    changed = site.cluster.folder / "changed.yaml"
    changed.write_text(yaml.safe_dump(values))
    assert "kv_transfer.retry: 3 -> 5  (needs a restart)" in site.farfill("config", "apply", str(changed))
    async with site.clients() as clients:
        for number, client in enumerate(clients):
            await _until_placed(client, "below_threshold", 30 + number)
        for _ in range(2):  # every time, not the first time only
            seen = json.loads(site.farfill("top", "--json"))
            waiting = [gateway["needs_restart"] for gateway in seen["gateways"]]
            assert all("kv_transfer.retry" in keys for keys in waiting), waiting
        assert "remote_prefill_threshold_tokens: 256 -> 50000" in _differs(site)
        assert "version 3 is in force" in site.farfill("config", "rollback", "--reason", "too high")
        for number, client in enumerate(clients):
            await _until_placed(client, "above_threshold", 32 + number)
    history = site.farfill("config", "history")
    assert "rollback to 1: too high" in history
    assert len(history.splitlines()) == 3
    assert "config 2 -> 3: " in site.farfill("rollout", "show")


def _differs(site: Site) -> str:
    command = [sys.executable, "-m", "farfill.cli.main", "config", "diff", "--config", str(site.cluster.config_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 1, done.stderr
    return done.stdout


async def _until_placed(client: GatewayClient, reason: str, variant: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while (await ask(client, 600, 100 * variant)).reason != reason:
            variant += 1


async def test_new_worker_version_prefill_first_then_decode_and_back(site: Site) -> None:
    site.start(NEW_PREFILL, NEW_DECODE)
    everybody = (DECODE, PREFILL, NEW_DECODE, NEW_PREFILL)
    await asyncio.to_thread(site.wait_known, *everybody)
    assert "prefill goes first" in site.farfill("rollout", "worker", "set", NEW, "10%", "--role", "decode", fails=True)
    site.farfill("rollout", "worker", "set", NEW, "100%", "--role", "prefill", "--sticky", "request")
    async with site.clients() as clients:
        await _until_served(clients, site, 40, lambda pair: pair[1] == NEW_PREFILL)
        site.farfill("rollout", "worker", "set", NEW, "100%", "--role", "decode", "--sticky", "request")
        await _until_served(clients, site, 50, lambda pair: pair == (NEW_DECODE, NEW_PREFILL))
        site.farfill("rollout", "worker", "revert", NEW, "--reason", "back to the old one")
        await _until_served(clients, site, 60, lambda pair: pair == (DECODE, PREFILL))
    shown = site.farfill("rollout", "show")
    assert f"prefill of version {NEW}: 0 %" in shown
    assert "back to the old one" in shown
    assert NEW in site.farfill("top", "--once")


async def _until_served(
    clients: tuple[GatewayClient, ...], site: Site, variant: int, holds: Callable[[tuple[str, str]], bool]
) -> None:
    """Both gateways follow within the deadline, and then stay so."""
    for number, client in enumerate(clients):
        after = 0
        async with asyncio.timeout(DEADLINE_S):
            while after < 4:
                variant += 1
                answer = await ask(client, 400, 1000 * (number + 1) + variant, forced="remote")
                record = await client.record(answer.request_id)
                fits = holds((record.decode_instance, record.prefill_instance))
                assert fits or not after, f"went back to {record.decode_instance}, {record.prefill_instance}"
                after += fits


async def test_prompt_that_kills_workers_ends_after_two_and_all_others_live(site: Site) -> None:
    workers = {DECODE, PREFILL, NEW_DECODE, NEW_PREFILL}
    async with site.clients() as (client, _):
        with pytest.raises(GatewayRefusedError) as refused:
            await client.complete(Generation(prompt=DEADLY_PROMPT, max_tokens=2, salt="operating", forced="remote"))
        assert (refused.value.status, refused.value.code) == (500, "request_kills_workers")
        died = site.cluster.events("gateway", "instance_died_of_request")
        dead = {line["instance"] for line in died}
        assert len(dead) == len(died) == 2
        # Those that are left go on; nobody dies of it later.
        for number in range(4):
            await ask(client, 300, 70 + number, forced="local")
        assert workers - site.cluster.alive() == dead
    assert {site.cluster.ended(name) for name in dead} == {-9}
