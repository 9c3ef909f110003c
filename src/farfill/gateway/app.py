"""The gateway as an aiohttp application: routes, error shape, start and stop of what the handlers share."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from farfill.config.model import ClusterConfig
from farfill.gateway.errors import openai_errors
from farfill.gateway.handlers.enter import entering
from farfill.gateway.handlers.generate import GenerateHandler
from farfill.gateway.handlers.info import InfoHandler
from farfill.gateway.handlers.internals import InternalsHandler
from farfill.gateway.handlers.request_id import tell_request_id, with_request_id
from farfill.gateway.look import status_of
from farfill.gateway.openapi import INTERNAL, PUBLIC, OpenApiHandler
from farfill.gateway.server import DIRECT, GatewayRunner, direct
from farfill.gateway.service import GatewayDeps, GatewayService, build_service

SERVICE = web.AppKey("service", GatewayService)


def build_app(deps: GatewayDeps) -> web.Application:
    """The application. Serve it with `build_runner`, or otherwise with handler cancellation on: a client that
    leaves must cancel its request on both sides."""
    service = build_service(deps)
    middlewares = [with_request_id, openai_errors, entering(service.gate)]
    app = web.Application(
        client_max_size=deps.config.gateway.max_body_mb << 20,
        middlewares=middlewares,
    )
    app[SERVICE] = service
    service.lookup.tell_status(lambda: status_of(service))
    generate = GenerateHandler(service)
    generating = {"/v1/chat/completions": generate.chat, "/v1/completions": generate.completions}
    app[DIRECT] = {path: direct(handler, middlewares) for path, handler in generating.items()}
    app.add_routes(
        [
            *(web.post(path, handler) for path, handler in generating.items()),
            *InfoHandler(service).routes(),
            *OpenApiHandler((*PUBLIC, *(INTERNAL if internals_open(deps.config) else ()))).routes(),
            *(InternalsHandler(service).routes() if internals_open(deps.config) else ()),
        ]
    )
    app.on_response_prepare.append(tell_request_id)
    app.cleanup_ctx.append(_lifetime)
    return app


def build_runner(deps: GatewayDeps, *, shutdown_timeout_s: float = 5.0) -> GatewayRunner:
    """A runner with what the gateway relies on. Requests in progress get `shutdown_timeout_s` to end."""
    return GatewayRunner(build_app(deps), shutdown_timeout_s=shutdown_timeout_s)


def internals_open(config: ClusterConfig) -> bool:
    """Whether the public address shows what is inside."""
    if config.gateway.internals == "auto":
        return config.access is None and config.admin is None
    return config.gateway.internals == "open"


async def _lifetime(app: web.Application) -> AsyncIterator[None]:
    service = app[SERVICE]
    await service.start()
    yield
    await service.close()
