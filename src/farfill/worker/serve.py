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

import farfill
from farfill.clock import Clock, WallClock
from farfill.config.load import LoadedConfig
from farfill.config.model import WorkerConfig
from farfill.config.secrets import TlsMaterial, read_tls, resolve_secret
from farfill.core.cluster import Instance, InstanceState, Role
from farfill.core.errors import CancelledWorkError, ConfigError, EngineError
from farfill.core.sampling import SamplingParams
from farfill.engine.grammar import ANY_OUTPUT
from farfill.engine.protocol import Engine
from farfill.registry.client import Announcer
from farfill.registry.identity import registry_context
from farfill.telemetry.metrics import WorkerMetrics, exposition
from farfill.transfer.encoder import lossy_form
from farfill.transfer.receiver import KVReceiver
from farfill.transfer.sender import KVSender
from farfill.transfer.tickets import OwnKey, TicketVerifier, new_signer
from farfill.transport.certificates import CertificateWatch, ServerContext
from farfill.transport.own_certificate import OwnCertificate
from farfill.transport.tls import PeerIdentity, client_context, http_server_context, server_context
from farfill.wire.control import PROTOCOL_VERSION
from farfill.worker.app import WorkerDeps, build_worker_app
from farfill.worker.blocks import BlockService
from farfill.worker.decode import DecodeService
from farfill.worker.fetch import FetchLimits, FetchService
from farfill.worker.held import HeldService
from farfill.worker.keep import KeepService
from farfill.worker.media import RenderService
from farfill.worker.prefill import PrefillService
from farfill.worker.text import takes_text
from farfill.worker.vllm_front import HeldAt, VllmFront

log = structlog.get_logger()

LOAD_PERIOD_S = 0.5
DRAIN_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What every part of one worker is built from."""

    loaded: LoadedConfig
    name: str
    worker: WorkerConfig
    engine: Engine
    metrics: WorkerMetrics
    tls: TlsMaterial
    server_tls: ssl.SSLContext
    http_tls: ssl.SSLContext
    client_tls: ssl.SSLContext
    registry_tls: ssl.SSLContext
    clock: Clock
    verifier: TicketVerifier
    own: OwnKey | None


async def run_worker(loaded: LoadedConfig, name: str, stop: asyncio.Event) -> None:
    """Serve worker `name` of the cluster file until `stop` is set."""
    config = loaded.config
    worker = config.workers[name]
    tls = read_tls(loaded, name)
    public_key = resolve_secret(config.tickets.public_key, loaded.base_dir)
    clock = WallClock()
    own = OwnKey(name, new_signer()) if worker.vllm_listen else None
    try:
        engine = await _load_engine(loaded, stop)
    except CancelledWorkError:
        return
    parts = _Parts(
        loaded=loaded,
        name=name,
        worker=worker,
        engine=engine,
        metrics=WorkerMetrics(site=worker.site, role=str(worker.role), model=config.model.name),
        tls=tls,
        server_tls=server_context(tls.cert_pem, tls.key_pem, tls.ca_pem),
        http_tls=http_server_context(tls.cert_pem, tls.key_pem, tls.ca_pem),
        client_tls=client_context(tls.cert_pem, tls.key_pem, tls.ca_pem),
        registry_tls=registry_context(tls.cert_pem, tls.key_pem, tls.ca_pem, config.cluster),
        clock=clock,
        verifier=TicketVerifier(public_key, clock, config.tickets.clock_tolerance_s, own),
        own=own,
    )
    parts.metrics.set_capacity(engine.info.kv_total_bytes)
    await _prepare_grammars(parts)
    engine.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            await _serve(parts, stack, stop)
    finally:
        await asyncio.to_thread(engine.close)


async def _prepare_grammars(parts: _Parts) -> None:
    """Build what constrained output needs of the vocabulary now: later it would hold up everything for seconds."""
    if parts.worker.role is Role.PREFILL:
        return
    prepared = parts.engine.prepare(SamplingParams(grammar=ANY_OUTPUT))
    error = await asyncio.to_thread(prepared.exception)
    if error is not None:
        log.warning("constrained_output_unavailable", error=str(error))


async def _load_engine(loaded: LoadedConfig, stop: asyncio.Event) -> Engine:
    # Engines are imported here and nowhere earlier: other roles run without them.
    config = loaded.config
    if config.engine.type == "vllm":
        from farfill.engine.vllm.loader import load_engine as load_vllm

        load_engine = functools.partial(load_vllm, stopped=stop.is_set)
        needs = "`make vllm` shows an environment that has it beside Farfill"
    else:
        from farfill.engine.torch import load_engine

        needs = "install Farfill with its torch extra: pip install 'farfill[torch]'"
    load = functools.partial(load_engine, config.model, config.engine, config.prefill, loaded.base_dir)
    try:
        return await asyncio.to_thread(load)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine.type: {config.engine.type} needs {error.name}, which is not installed; {needs}"
        ) from error


async def _serve(parts: _Parts, stack: contextlib.AsyncExitStack, stop: asyncio.Event) -> None:
    config, name, worker, engine = parts.loaded.config, parts.name, parts.worker, parts.engine
    sender = await _open_sender(parts, stack) if worker.role is not Role.DECODE else None
    receiver = await _open_receiver(parts, stack) if worker.role is not Role.PREFILL else None
    prefill = None
    if sender is not None:
        prefill = PrefillService(name, engine, sender, parts.verifier, parts.metrics)
    decode = None
    if receiver is not None:
        lossy = lossy_form(config.kv_transfer, engine.info.layout)
        decode = DecodeService(name, engine, receiver, parts.verifier, parts.metrics, lossy=lossy)
    instance = _instance(parts)
    front = await _open_front(parts, sender, receiver, stack) if worker.vllm_listen else None
    announcer = Announcer(
        registry_url=f"https://{config.registry.advertise or config.registry.listen}",
        ssl_context=parts.registry_tls,
        instance=instance,
        observer=parts.metrics,
    )
    deps = WorkerDeps(
        cluster=config.cluster,
        name=name,
        role=worker.role,
        site=worker.site,
        info=engine.info,
        prefill=prefill,
        decode=decode,
        render=RenderService(engine),
        keep=KeepService(engine, "" if decode is None else decode.lossy),
        held=None if front is None else front.held,
        blocks=BlockService(engine.blocks, instance.generation),
        is_ready=lambda: announcer.registered and not stop.is_set() and _engine_ready(engine),
        exposition=lambda: _exposition(parts),
    )
    http_tls = ServerContext(parts.http_tls)
    ends = [end for end in (sender, receiver) if end is not None]
    watch = _certificates(parts, ends, http_tls, announcer, None if front is None else front.fetch)
    await stack.enter_async_context(watch.running())
    await stack.enter_async_context(_http_server(deps, worker.listen, http_tls.context))
    if front is not None and worker.vllm_listen is not None:
        await stack.enter_async_context(_listening(front.build_app(), worker.vllm_listen, None))
    await stack.enter_async_context(announcer)
    log.info("worker_ready", fingerprint=engine.info.fingerprint)
    await _report_load(parts, receiver, announcer, stop)
    log.info("worker_draining", running=engine.load().running_sequences)
    await announcer.announce(state=InstanceState.DRAINING)
    await _drain(engine, receiver, front)


async def _open_sender(parts: _Parts, stack: contextlib.AsyncExitStack) -> KVSender:
    sender = KVSender(
        parts.name,
        parts.engine.info.fingerprint,
        parts.client_tls,
        parts.loaded.config.kv_transfer,
        parts.clock,
        parts.metrics,
        listen=parts.worker.transfer_listen if _dials(parts) == "receiver" else None,
        server_ctx=parts.server_tls,
    )
    await sender.start()
    stack.push_async_callback(sender.close)
    return sender


async def _open_receiver(parts: _Parts, stack: contextlib.AsyncExitStack) -> KVReceiver:
    receiver = KVReceiver(
        parts.worker.transfer_listen if _dials(parts) == "sender" else None,
        parts.name,
        parts.engine.info.fingerprint,
        parts.engine.info.layout,
        parts.server_tls,
        parts.verifier,
        parts.loaded.config.kv_transfer,
        parts.clock,
        parts.metrics,
        client_ctx=parts.client_tls,
    )
    await receiver.start()
    stack.push_async_callback(receiver.close)
    return receiver


async def _open_front(
    parts: _Parts, sender: KVSender | None, receiver: KVReceiver | None, stack: contextlib.AsyncExitStack
) -> VllmFront:
    """vLLM's own API for stock routers. Raises ConfigError with another engine."""
    # Here, so that workers with another engine do not need what it needs.
    from farfill.engine.vllm.engine import VllmEngine

    engine, config, worker = parts.engine, parts.loaded.config, parts.worker
    if not isinstance(engine, VllmEngine):
        raise ConfigError(f"workers.{parts.name}.vllm_listen needs engine.type: vllm")
    held = fetch = None
    if sender is not None:
        held = HeldService(
            name=parts.name,
            engine=engine,
            sender=sender,
            verifier=parts.verifier,
            metrics=parts.metrics,
            hold_s=config.kv_transfer.timeout_ms / 1000,
        )
        stack.callback(held.close)
    if receiver is not None:
        assert parts.own is not None
        fetch = FetchService(
            name=parts.name,
            engine=engine,
            receiver=receiver,
            signer=parts.own.signer,
            metrics=parts.metrics,
            clock=parts.clock,
            tls=parts.client_tls,
            target=worker.transfer_advertise or worker.transfer_listen or "",
            limits=FetchLimits(
                timeout_s=config.kv_transfer.timeout_ms / 1000,
                lifetime_s=config.tickets.lifetime_s,
                allow_fallback=config.routing.fallback_to_local_prefill,
            ),
        )
        await fetch.open()
        stack.push_async_callback(fetch.close)
    front = VllmFront(
        where=HeldAt(
            prefill=parts.name,
            url=f"https://{worker.advertise or worker.listen}",
            transfer_address=worker.transfer_advertise or worker.transfer_listen or "",
            fingerprint=engine.info.fingerprint,
        ),
        endpoint=engine.endpoint,
        held=held,
        fetch=fetch,
    )
    await front.open()
    stack.push_async_callback(front.close)
    return front


def _certificates(
    parts: _Parts,
    ends: list[KVSender | KVReceiver],
    http_tls: ServerContext,
    announcer: Announcer,
    fetch: FetchService | None,
) -> CertificateWatch[TlsMaterial]:
    """Everything this worker listens or dials with follows its certificate, key and CA."""

    config, worker = parts.loaded.config, parts.worker
    own = OwnCertificate(
        identity=PeerIdentity(config.cluster, worker.site, str(worker.role), parts.name),
        cert=config.tls.cert.format(name=parts.name),
        ca=config.tls.ca,
    )
    own.check(parts.tls.cert_pem, parts.tls.key_pem, parts.tls.ca_pem)

    def use(found: TlsMaterial) -> None:
        pems = (found.cert_pem, found.key_pem, found.ca_pem)
        own.check(*pems)
        server, client, http = server_context(*pems), client_context(*pems), http_server_context(*pems)
        registry = registry_context(*pems, config.cluster)
        for end in ends:
            end.use_contexts(server, client)
        http_tls.replace(http)
        if fetch is not None:
            fetch.tls = client
        announcer.use_context(registry)

    read = functools.partial(read_tls, parts.loaded, parts.name)
    return CertificateWatch(parts.tls, read, use, parts.metrics.certificates_changed)


def _dials(parts: _Parts) -> str:
    return parts.loaded.config.kv_transfer.dial


def _engine_ready(engine: Engine) -> bool:
    try:
        return engine.load().ready
    except EngineError:
        return False


def _exposition(parts: _Parts) -> tuple[bytes, str]:
    """This worker's metrics, and what its engine measured itself."""
    body, content_type = exposition(parts.metrics.registry)
    with contextlib.suppress(EngineError):
        body += parts.engine.load().exposition
    return body, content_type


def _instance(parts: _Parts) -> Instance:
    worker, info = parts.worker, parts.engine.info
    return Instance(
        name=parts.name,
        role=worker.role,
        site=worker.site,
        url=f"https://{worker.advertise or worker.listen}",
        transfer_address=worker.transfer_advertise or worker.transfer_listen or "",
        model=parts.loaded.config.model.name,
        fingerprint=info.fingerprint,
        generation=secrets.token_hex(8),
        state=InstanceState.READY,
        max_context_tokens=info.max_context_tokens,
        kv_total_bytes=info.kv_total_bytes,
        version=worker.version or farfill.__version__,
        protocol=PROTOCOL_VERSION,
        takes_text=takes_text(parts.engine),
    )


@contextlib.asynccontextmanager
async def _http_server(deps: WorkerDeps, listen: str, context: ssl.SSLContext) -> AsyncIterator[None]:
    async with _listening(build_worker_app(deps), listen, context):
        yield


@contextlib.asynccontextmanager
async def _listening(app: web.Application, listen: str, context: ssl.SSLContext | None) -> AsyncIterator[None]:
    # handler_cancellation: whoever goes away must end the work it asked for.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    host, port = listen.rsplit(":", 1)
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=context).start()
        yield
    finally:
        await runner.cleanup()


async def _report_load(
    parts: _Parts,
    receiver: KVReceiver | None,
    announcer: Announcer,
    stop: asyncio.Event,
) -> None:
    """Keep gauges and the registry's view of this worker fresh until `stop`.

    Raises EngineError when the engine is dead: the process ends, and whoever supervises it starts a new one.
    """
    while not stop.is_set():
        load = parts.engine.load()
        parts.metrics.set_load(load)
        if receiver is not None:
            parts.metrics.set_held_transfers(receiver.held_transfers())
        await announcer.announce(
            queued_tokens=load.queued_tokens,
            running_requests=load.running_sequences + load.waiting_sequences,
            kv_used_bytes=load.kv_used_bytes,
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOAD_PERIOD_S)


async def _drain(engine: Engine, receiver: KVReceiver | None, front: VllmFront | None) -> None:
    """Wait until the engine is idle, at most the grace period."""
    deadline_s = asyncio.get_running_loop().time() + DRAIN_GRACE_S
    while asyncio.get_running_loop().time() < deadline_s:
        load = engine.load()
        held = 0 if receiver is None else receiver.held_transfers()
        theirs = 0 if front is None else front.running
        if load.running_sequences + load.waiting_sequences + held + theirs == 0:
            return
        await asyncio.sleep(0.05)
    log.warning("drain_grace_over", running=engine.load().running_sequences)
