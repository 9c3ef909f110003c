"""GET /metrics and /healthz of `farfill autoscale`: what it saw, decided and told, and whether it still looks."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from farfill.core.errors import ConfigError

Metrics = Callable[[], tuple[bytes, str]]


@contextlib.asynccontextmanager
async def serving(listen: str | None, metrics: Metrics) -> AsyncIterator[None]:
    """Answers at `listen` (host:port) inside the block; None: nowhere. Raises ConfigError when it is taken."""
    if listen is None:
        yield
        return

    async def tell(_: web.Request) -> web.Response:
        body, content_type = metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def healthy(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes([web.get("/metrics", tell), web.get("/healthz", healthy)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"listen: {listen} cannot be used: {error.strerror or error}") from error
    try:
        yield
    finally:
        await runner.cleanup()
