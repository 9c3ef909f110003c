"""`farfill gateway`: the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
import typer
from aiohttp import web

from farfill.cli.gateway_admin import AdminServer
from farfill.cli.gateway_processes import GatewayProcesses
from farfill.cli.run_role import (
    Stop,
    http_server,
    registry_url,
    run_until_stopped,
    spare_the_collector,
    start_logging,
)
from farfill.clock import WallClock
from farfill.config.load import LoadedConfig, load_config
from farfill.config.secrets import TlsMaterial, read_public_tls, read_ticket_signing_key, read_tls
from farfill.core.errors import ConfigError
from farfill.gateway.access_open import open_access
from farfill.gateway.app import SERVICE, build_runner
from farfill.gateway.identity import worker_context
from farfill.gateway.reload import Reloaded
from farfill.gateway.service import GatewayDeps, GatewayService
from farfill.gateway.siblings import Siblings
from farfill.gateway.tokenizer import load_tokenizer
from farfill.registry.client import LAST_BACKOFF_S, InstanceWatcher
from farfill.registry.identity import registry_context
from farfill.registry.remote import RemoteStore
from farfill.telemetry.loop_lag import watch_loop_lag
from farfill.telemetry.metrics import GatewayMetrics, exposition
from farfill.transfer.tickets import TicketSigner
from farfill.transport.certificates import CertificateWatch, ServerContext
from farfill.transport.own_certificate import OwnCertificate
from farfill.transport.public_certificate import PublicCertificate
from farfill.transport.tls import PeerIdentity

log = structlog.get_logger()

# How long running requests may go on after SIGTERM.
DRAIN_S = 30.0
# How long before its end those that still run are told.
END_S = 2.0
# Longest wait for the registry before the API opens: a gateway that knows no worker yet would refuse everything.
FIRST_ANSWER_S = 5.0


def gateway(
    config: Annotated[Path, typer.Option(help="Cluster file.")] = Path("cluster.yaml"),
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes on the one port.")] = 1,
    process: Annotated[str, typer.Option(hidden=True)] = "0/1",
    process_folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the gateway."""
    loaded = load_config(config)
    index, _, count = process.partition("/")
    place = Place(int(index), int(count), process_folder)
    name = "gateway" if process_folder is None else f"gateway/{place.index}"
    start_logging(loaded, role="gateway", site=loaded.config.gateway.site, name=name)
    if workers > 1:
        run_until_stopped(GatewayProcesses(loaded, workers).run)
    else:
        run_until_stopped(lambda stop: serve_gateway(loaded, stop, place))


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the processes on one port this is (`gateway_processes`); alone without `folder`."""

    index: int = 0
    count: int = 1
    folder: Path | None = None


async def serve_gateway(loaded: LoadedConfig, stop: asyncio.Event, place: Place = Place()) -> None:
    """Serve until `stop`, then let running requests end."""
    config = loaded.config
    tls = read_tls(loaded, "gateway")
    metrics = GatewayMetrics(
        site=config.gateway.site, model=config.model.name, also=[model.name for model in config.models.values()]
    )
    watcher = InstanceWatcher(
        registry_url=registry_url(loaded),
        ssl_context=registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, config.cluster),
        observer=metrics,
        on_change=metrics.instances_known,
        first_answer_s=FIRST_ANSWER_S,
        grace_s=config.registry.lease_s + LAST_BACKOFF_S,
    )
    store = RemoteStore(registry_url(loaded), registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, config.cluster))
    own_metrics = functools.partial(exposition, metrics.registry)
    siblings = None if place.folder is None else Siblings(place.folder, place.index, place.count, own_metrics)
    deps = GatewayDeps(
        config=config,
        model=await asyncio.to_thread(load_tokenizer, loaded.model_dir),
        more_models={
            key: await asyncio.to_thread(load_tokenizer, loaded.base_dir / model.path)
            for key, model in config.models.items()
        },
        membership=watcher,
        sign_ticket=TicketSigner(read_ticket_signing_key(loaded)).sign,
        access=open_access(loaded, store, WallClock(), metrics.access.access, metrics.access.keys_known),
        entrance=metrics.access,
        worker_tls=worker_context(tls.cert_pem, tls.key_pem, tls.ca_pem, config.cluster),
        observer=metrics,
        policies=metrics.policies,
        base_dir=loaded.base_dir,
        metrics=own_metrics if siblings is None else siblings.metrics,
        registry_away_s=lambda: watcher.stale_s,
        store=store,
    )
    runner = build_runner(deps, shutdown_timeout_s=DRAIN_S)
    service = runner.app[SERVICE]
    reload = functools.partial(_reload, loaded.path, service)
    admin = None
    # One address, one process: the first has it.
    if config.admin is not None and place.index == 0:
        admin = AdminServer(
            loaded=loaded,
            config=config.admin,
            service=service,
            reload=_for_all(reload, place),
            observer=metrics.access,
            tls=tls,
        )

    own = OwnCertificate(
        identity=PeerIdentity(config.cluster, config.gateway.site, "gateway", "gateway"),
        cert=config.tls.cert.format(name="gateway"),
        ca=config.tls.ca,
        serves=False,
    )
    own.check(tls.cert_pem, tls.key_pem, tls.ca_pem)

    def use(found: TlsMaterial) -> None:
        pems = (found.cert_pem, found.key_pem, found.ca_pem)
        own.check(*pems)
        workers, registry = worker_context(*pems, config.cluster), registry_context(*pems, config.cluster)
        runner.app[SERVICE].client.use_context(workers)
        runner.app[SERVICE].feeds.use_context(workers)
        watcher.use_context(registry)
        store.use_context(registry)
        if admin is not None:
            admin.use(found)

    read = functools.partial(read_tls, loaded, "gateway")
    certificates = CertificateWatch(tls, read, use, metrics.certificates_changed)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, _try_reload, reload)
    lag = asyncio.create_task(watch_loop_lag(metrics.loop_lag))
    try:
        async with contextlib.AsyncExitStack() as stack:
            public = _public_server(loaded, runner, metrics, shared=siblings is not None)
            for context in (watcher, store, certificates.running(), public):
                await stack.enter_async_context(context)
            if siblings is not None:
                await stack.enter_async_context(siblings.listening())
            if admin is not None:
                await stack.enter_async_context(admin.running())
            if isinstance(stop, Stop):
                stop.hurry = service.open_requests.end
            spare_the_collector()
            await stop.wait()
            # Whoever is still there when draining ends hears why.
            loop.call_later(DRAIN_S - END_S, service.open_requests.end)
    finally:
        lag.cancel()


def _reload(path: Path, service: GatewayService) -> Reloaded:
    """What is safe of a changed cluster file applies now, and keys are read again.

    Raises ConfigError on a file with mistakes, which changes nothing.
    """
    found = load_config(path).config
    if service.gate.access is not None and service.gate.access.book is not None:
        service.gate.access.book.reload()
    return service.reloader.apply(found)


def _for_all(reload: Callable[[], Reloaded], place: Place) -> Callable[[], Reloaded]:
    """What reloads here, and then in the other processes by way of the one that started them."""

    def for_all() -> Reloaded:
        done = reload()
        if place.folder is not None:
            os.kill(os.getppid(), signal.SIGHUP)
        return done

    return for_all


def _try_reload(reload: Callable[[], Reloaded]) -> None:
    """SIGHUP."""
    try:
        reload()
    except ConfigError as error:
        log.error("config_not_reloaded", error=str(error))


@contextlib.asynccontextmanager
async def _public_server(
    loaded: LoadedConfig, runner: web.AppRunner, metrics: GatewayMetrics, *, shared: bool
) -> AsyncIterator[None]:
    """The API, with TLS if the cluster file says so; then it follows its certificate, too. `shared`: with others."""
    pems, listen = read_public_tls(loaded), loaded.config.gateway.listen
    if pems is None:
        async with http_server(runner, listen, None, shared=shared):
            yield
        return
    checked = PublicCertificate(f"gateway.tls_cert {loaded.config.gateway.tls_cert}", time.time)
    checked.check(pems[0])
    public = ServerContext(public_context(pems))
    metrics.public_certificate(checked.expires_unix_s(pems[0]))

    def read() -> tuple[bytes, bytes]:
        found = read_public_tls(loaded)
        assert found is not None, "the cluster file is read once"
        return found

    def use(found: tuple[bytes, bytes]) -> None:
        context = public_context(found)
        checked.check(found[0])
        public.replace(context)
        metrics.public_certificate(checked.expires_unix_s(found[0]))

    watch = CertificateWatch(pems, read, use, metrics.certificates_changed)
    async with watch.running(), http_server(runner, listen, public.context, shared=shared):
        yield


def public_context(pems: tuple[bytes, bytes]) -> ssl.SSLContext:
    """TLS of the public API from (certificate chain, key). Raises ConfigError when they do not fit."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # The ssl module reads chains from files only: one that nobody else can read, gone at once.
    handle, path = tempfile.mkstemp(prefix="farfill-", suffix=".pem")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pems[0].rstrip() + b"\n" + pems[1])
        context.load_cert_chain(path)
    except ssl.SSLError as error:
        raise ConfigError(f"gateway.tls_cert and tls_key do not fit together: {error}") from error
    finally:
        os.unlink(path)
    return context
