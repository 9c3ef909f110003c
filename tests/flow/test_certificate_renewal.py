"""A registry and a worker whose certificates change on disk: bad ones are refused and nothing is lost."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml

from farfill.cli.local_ports import free_ports
from farfill.cli.pki import create_pki, members_of
from farfill.cli.registry import serve_registry
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import read_tls
from farfill.engine.fake import FakeEngine
from farfill.registry.client import InstanceWatcher
from farfill.registry.identity import registry_context
from farfill.worker.serve import run_worker

WORKER = "prefill-far"


def cluster(folder: Path) -> LoadedConfig:
    registry, listen, transfer, near = (f"127.0.0.1:{port}" for port in free_ports(4))
    path = folder / "cluster.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "model": {"name": "any", "path": "model"},
                "gateway": {"site": "near"},
                "registry": {"site": "near", "listen": registry},
                "workers": {
                    WORKER: {"role": "prefill", "site": "far", "listen": listen},
                    "decode-near": {"role": "decode", "site": "near", "listen": near, "transfer_listen": transfer},
                },
                "tls": {"ca": "file:pki/ca.pem", "cert": "file:pki/{name}.pem", "key": "file:pki/{name}.key"},
                "tickets": {"signing_key": "file:pki/ticket.key", "public_key": "file:pki/ticket.pub"},
            }
        )
    )
    loaded = load_config(path)
    for name in ("pki", "stranger"):
        create_pki(folder / name, members_of(loaded.config), days=1)
    return loaded


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def put(folder: Path, source: Path, name: str, target: str) -> None:
    for suffix in (".key", ".pem"):
        shutil.copy(source / f"{name}{suffix}", folder / "pki" / f"{target}{suffix}")


@pytest.mark.parametrize("name", [WORKER, "registry"])
async def test_bad_renewal_is_refused_and_the_worker_keeps_the_registry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load_engine(*_: object) -> FakeEngine:
        return FakeEngine()

    monkeypatch.setattr("farfill.worker.serve._load_engine", load_engine)
    monkeypatch.setattr("farfill.transport.certificates.PERIOD_S", 0.02)
    loaded, stop = cluster(tmp_path), asyncio.Event()
    good = tmp_path / "good"
    shutil.copytree(tmp_path / "pki", good)
    tls = read_tls(loaded, "gateway")
    watcher = InstanceWatcher(
        registry_url=f"https://{loaded.config.registry.listen}",
        ssl_context=registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, loaded.config.cluster),
    )
    with structlog.testing.capture_logs() as logged:

        def told(event: str, text: str = "") -> list[Any]:
            return [e for e in logged if e["event"] == event and text in e.get("detail", "")]

        async with asyncio.TaskGroup() as group:
            group.create_task(serve_registry(loaded, stop))
            async with watcher:
                group.create_task(run_worker(loaded, WORKER, stop))
                await until(lambda: [i.name for i in watcher.instances()] == [WORKER])
                put(tmp_path, tmp_path / "stranger", name, name)
                await until(lambda: told("certificates_refused", f"pki/{name}.pem"))
                put(tmp_path, good, "decode-near", name)
                await until(lambda: told("certificates_refused", "/near/decode/decode-near"))
                put(tmp_path, good, name, name)
                await until(lambda: [i.name for i in watcher.instances()] == [WORKER])
            stop.set()
    assert told("certificates_replaced") == []
    assert told("connection_refused") == []
