"""A worker process: loads the engine, opens both ends, announces itself, serves until told to stop.

Draining: leave the registry, let running work finish within the grace period, then close. What is still
running then is cancelled and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog
from aiohttp import web

from farfill.clock import WallClock
from farfill.config.load import LoadedConfig
from farfill.config.model import WorkerConfig
from farfill.config.secrets import resolve_secret
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.engine.protocol import Engine
from farfill.registry.client import Announcer
from farfill.telemetry.metrics import WorkerMetrics, exposition
from farfill.transfer.receiver import KVReceiver
from farfill.transfer.sender import KVSender
from farfill.transfer.tickets import TicketVerifier
from farfill.transport.tls import client_context, server_context
from farfill.worker.app import WorkerDeps, build_worker_app
from farfill.worker.decode import DecodeService
from farfill.worker.prefill import PrefillService

log = structlog.get_logger()

LOAD_PERIOD_S = 0.5
DRAIN_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """PEM material of this worker."""

    cert: bytes
    key: bytes
    ca: bytes

    def server(self) -> ssl.SSLContext:
        return server_context(self.cert, self.key, self.ca)

    def client(self) -> ssl.SSLContext:
        return client_context(self.cert, self.key, self.ca)


async def run_worker(loaded: LoadedConfig, name: str, stop: asyncio.Event) -> None:
    """Serve worker `name` of the cluster file until `stop` is set."""
    config = loaded.config
    worker = config.workers[name]
    tls = config.tls
    identity = _Identity(
        cert=resolve_secret(tls.cert.format(name=name), loaded.base_dir),
        key=resolve_secret(tls.key.format(name=name), loaded.base_dir, private=True),
        ca=resolve_secret(tls.ca, loaded.base_dir),
    )
    metrics = WorkerMetrics(site=worker.site, role=str(worker.role), model=config.model.name)
    engine = await _load_engine(loaded)
    engine.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            await _serve(loaded, name, worker, identity, engine, metrics, stack, stop)
    finally:
        await asyncio.to_thread(engine.close)


async def _load_engine(loaded: LoadedConfig) -> Engine:
    # torch and transformers are imported here and nowhere earlier: other roles run without them.
    from farfill.engine.torch import load_engine

    config = loaded.config
    load = functools.partial(load_engine, config.model, config.engine, config.prefill, loaded.base_dir)
    return await asyncio.to_thread(load)


async def _serve(
    loaded: LoadedConfig,
    name: str,
    worker: WorkerConfig,
    identity: _Identity,
    engine: Engine,
    metrics: WorkerMetrics,
    stack: contextlib.AsyncExitStack,
    stop: asyncio.Event,
) -> None:
    config = loaded.config
    clock = WallClock()
    verifier = TicketVerifier(
        resolve_secret(config.tickets.public_key, loaded.base_dir), clock, config.tickets.clock_tolerance_s
    )
    fingerprint = engine.info.fingerprint
    prefill = decode = receiver = None
    if worker.role is not Role.DECODE:
        sender = KVSender(name, fingerprint, identity.client(), config.kv_transfer, clock, metrics)
        await sender.start()
        stack.push_async_callback(sender.close)
        prefill = PrefillService(name, engine, sender, verifier, metrics)
    if worker.role is not Role.PREFILL:
        assert worker.transfer_listen is not None, "checked by the config model"
        receiver = KVReceiver(
            worker.transfer_listen,
            name,
            fingerprint,
            engine.info.layout,
            identity.server(),
            verifier,
            config.kv_transfer,
            clock,
            metrics,
        )
        await receiver.start()
        stack.push_async_callback(receiver.close)
        decode = DecodeService(name, engine, receiver, verifier, metrics)
    announcer = Announcer(
        registry_url=f"https://{config.registry.advertise or config.registry.listen}",
        ssl_context=identity.client(),
        instance=_instance(loaded, name, worker, engine),
    )
    deps = WorkerDeps(
        cluster=config.cluster,
        name=name,
        role=worker.role,
        site=worker.site,
        info=engine.info,
        prefill=prefill,
        decode=decode,
        is_ready=lambda: announcer.registered and not stop.is_set(),
        exposition=functools.partial(exposition, metrics.registry),
    )
    runner = await stack.enter_async_context(_http_server(deps, worker.listen, identity.server()))
    await stack.enter_async_context(announcer)
    log.info("worker_ready", name=name, role=str(worker.role), site=worker.site, fingerprint=fingerprint)
    await _report_load(engine, receiver, metrics, announcer, stop)
    log.info("worker_draining", name=name, running=engine.load().running_sequences)
    await announcer.announce(state=InstanceState.DRAINING)
    await _drain(engine, runner)


def _instance(loaded: LoadedConfig, name: str, worker: WorkerConfig, engine: Engine) -> Instance:
    info = engine.info
    return Instance(
        name=name,
        role=worker.role,
        site=worker.site,
        url=f"https://{worker.advertise or worker.listen}",
        transfer_address=worker.transfer_advertise or worker.transfer_listen or "",
        model=loaded.config.model.name,
        fingerprint=info.fingerprint,
        generation=secrets.token_hex(8),
        state=InstanceState.READY,
        max_context_tokens=info.max_context_tokens,
        kv_total_bytes=info.kv_total_bytes,
    )


@contextlib.asynccontextmanager
async def _http_server(
    deps: WorkerDeps, listen: str, context: ssl.SSLContext
) -> AsyncIterator[web.AppRunner]:
    # handler_cancellation: a gateway that goes away must end the work it asked for.
    runner = web.AppRunner(build_worker_app(deps), handler_cancellation=True, access_log=None)
    await runner.setup()
    host, port = listen.rsplit(":", 1)
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=context, shutdown_timeout=1.0).start()
        yield runner
    finally:
        await runner.cleanup()


async def _report_load(
    engine: Engine,
    receiver: KVReceiver | None,
    metrics: WorkerMetrics,
    announcer: Announcer,
    stop: asyncio.Event,
) -> None:
    """Keep gauges and the registry's view of this worker fresh until `stop`."""
    while not stop.is_set():
        load = engine.load()
        metrics.set_load(load)
        if receiver is not None:
            metrics.set_held_transfers(receiver.held_transfers())
        await announcer.announce(
            queued_tokens=load.queued_tokens,
            running_requests=load.running_sequences + load.waiting_sequences,
            kv_used_bytes=load.kv_used_bytes,
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOAD_PERIOD_S)


async def _drain(engine: Engine, runner: web.AppRunner) -> None:
    """Wait until the engine is idle and no request is open, at most the grace period."""
    deadline_s = asyncio.get_running_loop().time() + DRAIN_GRACE_S
    while asyncio.get_running_loop().time() < deadline_s:
        load = engine.load()
        if load.running_sequences + load.waiting_sequences == 0:
            return
        await asyncio.sleep(0.05)
    log.warning("drain_grace_over", running=engine.load().running_sequences)
