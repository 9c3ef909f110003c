"""What every long-running role shares: logs, signals, the event loop, a server that drains."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import structlog
from aiohttp import web

from farfill.config.checks import split_address
from farfill.config.load import LoadedConfig
from farfill.config.secrets import TlsMaterial
from farfill.core.cluster import Role
from farfill.core.errors import ConfigError
from farfill.telemetry.logs import setup_logging
from farfill.transport.tls import http_server_context

log = structlog.get_logger()

SHUTDOWN_TIMEOUT_S = 2.0
HURRY_S = 1.0


def start_logging(loaded: LoadedConfig, *, role: str, site: str, name: str) -> None:
    """Logs as the cluster file says, with who speaks on every line."""
    setup_logging(loaded.config.logging.level, loaded.config.logging.format, role=role, site=site, name=name)


class Stop(asyncio.Event):
    """Set by the first SIGTERM or SIGINT. `hurry` is called by the second, if anybody needs a moment to break off."""

    hurry: Callable[[], None] | None = None


def run_until_stopped(serve: Callable[[Stop], Coroutine[Any, Any, None]]) -> None:
    """Run `serve(stop)` on a uvloop. SIGTERM and SIGINT set `stop`.

    The second one ends the process at once, or within `HURRY_S` after `stop.hurry`; the third one at once.
    """
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(serve))


def spare_the_collector() -> None:
    """What is there by now stays: collections of cyclic garbage look at what came since, and less often.

    Requests leave few cycles behind. By default every 700 objects are looked through, which a busy gateway makes in two
    requests, and all of them, tokenizer and certificates included, every now and then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pick_worker(loaded: LoadedConfig, role: Role, name: str | None) -> str:
    """The worker of `role` (or mixed) to run. Raises ConfigError when `name` is needed or does not fit."""
    workers = loaded.config.workers
    fitting = [key for key, worker in workers.items() if worker.role in (role, Role.MIXED)]
    if name is None:
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise ConfigError(f"{loaded.path}: no worker has role {role}")
        raise ConfigError(f"{loaded.path}: several workers fit; say --name with one of: {', '.join(fitting)}")
    if name not in workers:
        raise ConfigError(f"{loaded.path}: no worker is named {name}; known: {', '.join(workers)}")
    if name not in fitting:
        raise ConfigError(f"{loaded.path}: {name} has role {workers[name].role}, not {role}")
    return name


def server_tls(material: TlsMaterial) -> ssl.SSLContext:
    """Mutual TLS for a server of this role."""
    return http_server_context(material.cert_pem, material.key_pem, material.ca_pem)


def registry_url(loaded: LoadedConfig) -> str:
    """Where the registry is reached."""
    registry = loaded.config.registry
    return f"https://{registry.advertise or registry.listen}"


def plain_runner(app: web.Application) -> web.AppRunner:
    """A runner for servers whose answers are short. A caller that goes away ends the work it asked for."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        auto_decompress=False,  # as the gateway's: see its `read_body`
    )


@contextlib.asynccontextmanager
async def http_server(
    runner: web.AppRunner, listen: str, context: ssl.SSLContext | None, *, shared: bool = False
) -> AsyncIterator[None]:
    """Serve at `listen`; at the end, open requests get the runner's shutdown time. `shared`: with other processes.

    Raises ConfigError when the address cannot be had.
    """
    await runner.setup()
    host, port = split_address(listen)
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=context, reuse_port=shared or None).start()
        except OSError as error:
            raise ConfigError(f"cannot listen at {listen}: {os.strerror(error.errno or 0)}") from error
        log.info("listening", address=listen)
        yield
    finally:
        await runner.cleanup()


async def _serve(serve: Callable[[Stop], Coroutine[Any, Any, None]]) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            log.warning("stopped_at_once", signal=number.name)
            hurry, stop.hurry = stop.hurry, None
            if hurry is None:
                os._exit(128 + number)
            hurry()
            loop.call_later(HURRY_S, os._exit, 128 + number)
            return
        log.info("stopping", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await serve(stop)
