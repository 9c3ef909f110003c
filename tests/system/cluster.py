"""A cluster of real processes for system tests: starts, breaks and restarts its members, and reads what they say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from farfill.cli.child import Child
from farfill.cli.local_cluster import DECODE, PREFILL, LocalPlan, cluster_values, merged  # noqa: F401 - for tests
from farfill.cli.local_ports import HOST, free_ports
from farfill.cli.pki import create_pki, members_of
from farfill.config.load import LoadedConfig, load_config
from farfill.verify.client import GatewayClient, gateway_client
from farfill.verify.scrape import Scraper, scraper

START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 20.0
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# One thread a worker: each site has a core of its own, as on two machines. The breaker has tests of its own;
# here far prefill is broken on purpose. So has the limit of a link, which one long prompt can reach where busy cores
# let a link look slow. A dead worker leaves the registry soon.
_DEFAULTS: dict[str, Any] = {
    "engine": {"threads": 1},
    "registry": {"lease_s": 2.0},
    "routing": {"circuit_breaker": {"min_requests": 1_000_000}, "link_utilisation_limit": 1.0},
    "kv_transfer": {"compression": "none"},
    "logging": {"format": "json"},
}


class Cluster:
    """Owns its processes: whatever was started here is stopped here.

    With `relayed`, prefill workers are told to push KV to `kv_relay_port`, where the test puts a relay to `kv_address`.
    """

    def __init__(
        self, plan: LocalPlan, folder: Path, *, relayed: bool = False, start_deadline_s: float = START_DEADLINE_S
    ) -> None:
        self._start_deadline_s = start_deadline_s
        self.folder = folder
        self.values = cluster_values(plan)
        decode = self.values["workers"][DECODE]
        self.kv_address: str = decode["transfer_listen"]
        (self.kv_relay_port,) = free_ports(1)
        if relayed:
            decode["transfer_advertise"] = f"{HOST}:{self.kv_relay_port}"
        self.config_path = self.write_config("cluster.yaml", {})
        self.loaded: LoadedConfig = load_config(self.config_path)
        create_pki(folder / "pki", members_of(self.loaded.config), days=1)
        self._workers = {name: str(worker.role) for name, worker in self.loaded.config.workers.items()}
        self._children: dict[str, Child] = {}
        self._logs: dict[str, list[Path]] = {}

    @property
    def url(self) -> str:
        """Where the gateway answers."""
        return f"http://{self.loaded.config.gateway.listen}"

    def write_config(self, name: str, changes: Mapping[str, Any]) -> Path:
        """The cluster file with `changes`, beside the others."""
        path = self.folder / name
        path.write_text(yaml.safe_dump(merged(self.values, changes), sort_keys=False))
        return path

    def start(self) -> None:
        """Start everything and wait until the gateway knows all workers."""
        for name in ("registry", "gateway", *self._workers):
            self.spawn(name)
        self.wait_known(set(self._workers))

    def spawn(
        self,
        name: str,
        *,
        config: Path | None = None,
        role: str | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        options: Sequence[str] = (),
    ) -> None:
        """Start one member. `role` names the command where `name` is not a member's."""
        command = [role or self._workers.get(name, name), "--config", str(config or self.config_path), *options]
        if name in self._workers:
            command += ["--name", name]
        logs = self._logs.setdefault(name, [])
        logs.append(self.folder / f"{name}.{len(logs)}.log")
        self._children[name] = Child(name, command, logs[-1], {**_ENVIRONMENT, **(environment or {})}, python)

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def kill(self, name: str) -> None:
        """SIGKILL, as a machine that loses power."""
        child = self._children.pop(name)
        child.signal(signal.SIGKILL)
        assert child.wait(STOP_DEADLINE_S)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send `number` to one member."""
        self._children[name].signal(number)

    def stop(self, name: str) -> int | None:
        """SIGTERM, and the exit status (that of SIGKILL when it did not stop in time)."""
        self._children[name].signal(signal.SIGTERM)
        return self._stopped(name)

    def alive(self) -> set[str]:
        """Members whose processes run."""
        return {name for name, child in self._children.items() if child.exit_code is None}

    def ended(self, name: str) -> int | None:
        """Exit status of a member that ends by itself (that of SIGKILL when it did not in time)."""
        return self._stopped(name)

    def stop_all(self) -> dict[str, int | None]:
        """Exit status of every process still running. The registry goes last: the others say goodbye to it."""
        others = [name for name in self._children if name != "registry"]
        for name in others:
            self._children[name].signal(signal.SIGTERM)
        statuses = {name: self._stopped(name) for name in others}
        return {**statuses, **{name: self.stop(name) for name in list(self._children)}}

    def wait_known(self, names: set[str], *, url: str | None = None) -> None:
        """Wait until the gateway knows exactly these workers as ready."""
        self._wait(lambda known: set(known) == names, f"exactly {names}", url or self.url)

    async def respawn(self, name: str, *, environment: Mapping[str, str] | None = None) -> None:
        """Start a member that is gone, and wait until the gateway knows its new life (not its old lease)."""
        old = _ready_workers(self.url).get(name)
        self.spawn(name, environment=environment)
        new_life = f"a new {name}"
        await asyncio.to_thread(self._wait, lambda known: known.get(name) not in (None, old), new_life, self.url)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Log lines of one kind a member wrote, over all its lives."""
        lines = [line for path in self._logs[name] for line in path.read_text("utf-8", "replace").splitlines()]
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in parsed if line.get("event") == event]

    def log_tail(self, name: str) -> str:
        """The last lines a member wrote."""
        return "\n".join(self._logs[name][-1].read_text("utf-8", "replace").splitlines()[-30:])

    def client(self, *, url: str | None = None) -> contextlib.AbstractAsyncContextManager[GatewayClient]:
        return gateway_client(url or self.url, timeout_s=180.0)

    @contextlib.asynccontextmanager
    async def tools(self) -> AsyncIterator[tuple[GatewayClient, Scraper]]:
        """The gateway's client and a scraper of all members."""
        async with self.client() as client, scraper(self.loaded) as scraping:
            yield client, scraping

    def _wait(self, holds: Callable[[dict[str, str]], bool], what: str, url: str) -> None:
        end_s = time.monotonic() + self._start_deadline_s
        while not holds(known := _ready_workers(url)):
            for name, child in self._children.items():
                if child.exit_code is not None:
                    raise AssertionError(f"{name} exited with {child.exit_code}:\n{self.log_tail(name)}")
            if time.monotonic() > end_s:
                raise AssertionError(f"the gateway knows {known}, not {what}\n{self.log_tail('gateway')}")
            time.sleep(0.1)

    def _stopped(self, name: str) -> int | None:
        child = self._children.pop(name)
        if not child.wait(STOP_DEADLINE_S):
            child.signal(signal.SIGKILL)
            child.wait(STOP_DEADLINE_S)
        return child.exit_code


def local_plan(model_dir: Path, name: str, **changes: Any) -> LocalPlan:
    """A plan with a free port, small prefill chunks and a low threshold; `overrides` come on top of the tests' own."""
    values: dict[str, Any] = {"threshold_tokens": 256, "chunk_tokens": 64, "timeout_ms": 4_000, "kv_cache_mb": 768}
    values["overrides"] = merged(_DEFAULTS, changes.pop("overrides", {}))
    return LocalPlan(model_name=name, model_dir=model_dir, port=free_ports(1)[0], **{**values, **changes})


@contextlib.contextmanager
def running(
    plan: LocalPlan, folder: Path, *, relayed: bool = False, start_deadline_s: float = START_DEADLINE_S
) -> Iterator[Cluster]:
    """A started cluster; everything is stopped at the end, and must have stopped when told to."""
    cluster = Cluster(plan, folder, relayed=relayed, start_deadline_s=start_deadline_s)
    try:
        cluster.start()
        yield cluster
    finally:
        statuses = cluster.stop_all()
    assert set(statuses.values()) <= {0}, f"exit statuses {statuses}"


def _ready_workers(url: str) -> dict[str, str]:
    """Generation of each ready worker by name; empty while the gateway does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/v1/farfill/instances", timeout=5) as answer:
            instances = json.load(answer)["instances"]
    except (OSError, urllib.error.URLError):
        return {}
    return {entry["name"]: entry["generation"] for entry in instances if entry["state"] == "ready"}
