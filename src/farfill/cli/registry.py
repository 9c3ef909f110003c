"""`farfill registry`: the membership service."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Annotated

import typer

from farfill.cli.run_role import http_server, plain_runner, run_until_stopped, server_tls, start_logging
from farfill.clock import WallClock
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import TlsMaterial, read_tls
from farfill.registry.opening import open_store
from farfill.registry.server import RegistryService
from farfill.telemetry.metrics import RegistryMetrics
from farfill.transport.certificates import CertificateWatch, ServerContext
from farfill.transport.own_certificate import OwnCertificate
from farfill.transport.tls import PeerIdentity


def registry(config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml")) -> None:
    """Run the registry."""
    loaded = load_config(config)
    start_logging(loaded, role="registry", site=loaded.config.registry.site, name="registry")
    run_until_stopped(lambda stop: serve_registry(loaded, stop))


async def serve_registry(loaded: LoadedConfig, stop: asyncio.Event) -> None:
    """Serve until `stop`."""
    config, clock = loaded.config, WallClock()
    workers = [(worker.site, str(worker.role)) for worker in config.workers.values()]
    tls = read_tls(loaded, "registry")
    server = ServerContext(server_tls(tls))
    metrics = RegistryMetrics(site=config.registry.site, workers=workers)
    own = OwnCertificate(
        identity=PeerIdentity(config.cluster, config.registry.site, "registry", "registry"),
        cert=config.tls.cert.format(name="registry"),
        ca=config.tls.ca,
        dials=False,
    )
    own.check(tls.cert_pem, tls.key_pem, tls.ca_pem)

    def use(found: TlsMaterial) -> None:
        own.check(found.cert_pem, found.key_pem, found.ca_pem)
        server.replace(server_tls(found))

    read = functools.partial(read_tls, loaded, "registry")
    certificates = CertificateWatch(tls, read, use, metrics.certificates_changed)
    async with open_store(loaded, clock) as store:
        service = RegistryService(
            cluster=config.cluster,
            store=store,
            lease_s=config.registry.lease_s,
            clock=clock,
            metrics=metrics,
        )
        runner = plain_runner(service.app())
        async with certificates.running(), http_server(runner, config.registry.listen, server.context):
            await stop.wait()
