"""Two far sites and a near one as real processes: three gateways, two decode and two prefill workers, registry and
etcd, with a relay in every link that leaves a site, in the way to one decode worker, and in that to etcd."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.system.cluster import DECODE, PREFILL, Cluster, local_plan
from tests.system.models import write_full_attention

from farfill.cli.local_ports import HOST, free_ports
from farfill.testing.relay import Relay
from farfill.verify.scrape import parse_samples
from support.etcd import EtcdServer

GATEWAYS = ("gateway", "gateway-1", "gateway-2")
DECODES = (DECODE, "decode-two")
FAR = {"far": PREFILL, "other": "prefill-other"}
LEASE_S = 3.0
SILENCE_MS = 1_500


@dataclass(frozen=True, slots=True)
class SiteLinks:
    """The ways to and from one far site: its control API, its KV, the registry it reports to."""

    control: Relay
    kv: Relay
    registry: Relay

    @property
    def all(self) -> tuple[Relay, ...]:
        """Each of them."""
        return self.control, self.kv, self.registry


class KillPlane:
    """Started; kill and start again what you like, cut what you like."""

    def __init__(
        self, cluster: Cluster, etcd: EtcdServer, etcd_link: Relay, decode_link: Relay, sites: dict[str, SiteLinks]
    ) -> None:
        self.cluster = cluster
        self.etcd = etcd
        self.etcd_link = etcd_link
        self.decode_link = decode_link
        self.sites = sites
        self._changes: dict[str, dict[str, Any]] = {GATEWAYS[0]: {}}
        self._configs: dict[str, Path] = {GATEWAYS[0]: cluster.config_path}
        for site, name in FAR.items():
            advertise = {"registry": {"advertise": sites[site].registry.address}}
            self._configs[name] = cluster.write_config(f"{name}.yaml", advertise)
        self.urls = {GATEWAYS[0]: cluster.url}
        for name, port in zip(GATEWAYS[1:], free_ports(2), strict=True):
            self._changes[name] = {"gateway": {"listen": f"{HOST}:{port}"}}
            self._configs[name] = cluster.write_config(f"{name}.yaml", self._changes[name])
            self.urls[name] = f"http://{HOST}:{port}"

    def spawn(self, name: str) -> None:
        """Start one process."""
        role = "gateway" if name in GATEWAYS else None
        self.cluster.spawn(name, config=self._configs.get(name), role=role)

    async def reload(self, changes: dict[str, Any], deadline_s: float) -> None:
        """Write other cluster files for the gateways, and wait until each has taken its own over."""
        for name in GATEWAYS:
            before = len(self.cluster.events(name, "config_reloaded"))
            self.cluster.write_config(self._configs[name].name, {**self._changes[name], **changes})
            self.cluster.signal(name, signal.SIGHUP)
            async with asyncio.timeout(deadline_s):
                while len(self.cluster.events(name, "config_reloaded")) == before:
                    await asyncio.sleep(0.05)

    def start(self) -> None:
        """Everything, until all gateways know all workers."""
        for name in ("registry", *DECODES, *FAR.values(), *GATEWAYS):
            self.spawn(name)
        for url in self.urls.values():
            self.cluster.wait_known({*DECODES, *FAR.values()}, url=url)

    async def known(self, name: str) -> str:
        """The generation of a worker as the first gateway knows it; empty while it is not ready."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.cluster.url}/v1/farfill/instances") as answer:
            instances = (await answer.json())["instances"]
        return next((i["generation"] for i in instances if i["name"] == name and i["state"] == "ready"), "")

    async def until_listening(self, name: str, lives: int, deadline_s: float) -> None:
        """Until so many lives of `name` have opened their ports."""
        async with asyncio.timeout(deadline_s):
            while len(self.cluster.events(name, "listening")) < lives:
                await asyncio.sleep(0.05)

    async def registry_state(self) -> dict[str, str]:
        """What each gateway says of the registry."""
        found: dict[str, str] = {}
        async with aiohttp.ClientSession() as http:
            for name, url in self.urls.items():
                async with http.get(f"{url}/v1/farfill/rollout") as answer:
                    found[name] = (await answer.json())["registry"]
        return found

    async def check_nothing_left(self, deadline_s: float) -> None:
        """No worker holds anything, no gateway has anything in progress."""
        async with self.cluster.tools() as (_, scraping), aiohttp.ClientSession() as http:
            await scraping.wait_idle(deadline_s=deadline_s)
            for name, url in self.urls.items():
                async with http.get(f"{url}/metrics") as answer:
                    samples = parse_samples(await answer.text())
                async with http.get(f"{url}/v1/farfill/instances") as answer:
                    page: dict[str, Any] = await answer.json()
                assert samples.total("farfill_requests_in_flight") == 0, name
                assert page["requests_in_progress"] == 0, name
                outstanding = {i["name"]: i["outstanding_requests"] for i in page["instances"]}
                assert outstanding == dict.fromkeys((*DECODES, *FAR.values()), 0), name


@contextlib.contextmanager
def running_plane(folder: Path) -> Iterator[KillPlane]:
    """Start all; at the end everything must stop when told to."""
    (folder / "etcd").mkdir()
    etcd = EtcdServer(folder / "etcd")
    with contextlib.ExitStack() as stack:
        etcd.start()
        stack.callback(etcd.kill)
        etcd.enable_auth()
        etcd_link = stack.enter_context(Relay(etcd.url.removeprefix("https://localhost").replace(":", f"{HOST}:")))
        registry, *ports = (f"{HOST}:{port}" for port in free_ports(6))
        decode_link = stack.enter_context(Relay(ports[4]))
        sites: dict[str, SiteLinks] = {}
        workers: dict[str, Any] = {
            DECODE: {"transfer_listen": None},
            DECODES[1]: {
                "role": "decode",
                "site": "near",
                "listen": ports[4],
                "advertise": decode_link.address,
            },
        }
        for (site, name), control, kv in zip(FAR.items(), ports[:2], ports[2:4], strict=True):
            links = SiteLinks(*(stack.enter_context(Relay(target)) for target in (control, kv, registry)))
            sites[site] = links
            workers[name] = {
                "role": "prefill",
                "site": site,
                "listen": control,
                "advertise": links.control.address,
                "transfer_listen": kv,
                "transfer_advertise": links.kv.address,
            }
        section = etcd.registry_section(f"https://localhost:{etcd_link.address.rpartition(':')[2]}")
        plan = local_plan(
            write_full_attention(folder / "model"),
            "full",
            timeout_ms=SILENCE_MS,
            overrides={
                "gateway": {"decision_log": "decisions/{pid}.jsonl"},
                "registry": {"listen": registry, "lease_s": LEASE_S, **section},
                "workers": workers,
                # Decode dials, so that each far site has a link of its own.
                "kv_transfer": {"dial": "receiver"},
                "routing": {"circuit_breaker": {"min_requests": 5, "window_s": 5.0, "open_s": 1.0}},
            },
        )
        cluster = Cluster(plan, folder)
        plane = KillPlane(cluster, etcd, etcd_link, decode_link, sites)
        try:
            plane.start()
            yield plane
        finally:
            statuses = cluster.stop_all()
        assert set(statuses.values()) <= {0}, f"exit statuses {statuses}"
