"""`farfill registry`: the membership service."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from farfill.cli.run_role import http_server, plain_runner, run_until_stopped, server_tls, start_logging
from farfill.clock import WallClock
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import read_tls
from farfill.registry.server import RegistryService
from farfill.registry.store import RegistryStore
from farfill.telemetry.metrics import RegistryMetrics


def registry(config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml")) -> None:
    """Run the registry."""
    loaded = load_config(config)
    start_logging(loaded, role="registry", site=loaded.config.registry.site, name="registry")
    run_until_stopped(lambda stop: serve_registry(loaded, stop))


async def serve_registry(loaded: LoadedConfig, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    config = loaded.config
    workers = [(worker.site, str(worker.role)) for worker in config.workers.values()]
    service = RegistryService(
        cluster=config.cluster,
        # Milliseconds of the wall clock: no restart begins at a revision its predecessor has handed out.
        store=RegistryStore(config.registry.lease_s, first_revision=time.time_ns() // 1_000_000),
        clock=WallClock(),
        metrics=RegistryMetrics(site=config.registry.site, workers=workers),
    )
    tls = server_tls(read_tls(loaded, "registry"))
    async with http_server(plain_runner(service.app()), config.registry.listen, tls):
        await stop.wait()
