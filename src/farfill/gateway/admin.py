"""The admin API: a server of its own, for those who run the gateway. Add routes in `admin_routes`.

GET asks for the right to look, everything else for the right to change; whoever has neither gets 401 or 403 before a
handler is called. `ADMIN` tells a handler who asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from farfill.gateway.errors import openai_errors
from farfill.gateway.handlers.internals import InternalsHandler
from farfill.gateway.handlers.request_id import tell_request_id, with_request_id
from farfill.gateway.service import GatewayService

MAX_BODY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Admin:
    """Who asks: `name` as the audit log shows it; whether it may change anything."""

    name: str
    may_write: bool


ADMIN = web.RequestKey("admin", Admin)

Identify = Callable[[web.Request], Awaitable[Admin]]
"""Who asks. Raises a FarfillError when nobody who may, or when the right to change is missing."""


def admin_routes(service: GatewayService) -> list[web.RouteDef]:
    """Everything the admin API answers."""
    return [
        *InternalsHandler(service).routes(),
    ]


def build_admin_app(service: GatewayService, identify: Identify) -> web.Application:
    """The application; `identify` runs before every handler."""

    @web.middleware
    async def authorised(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        request[ADMIN] = await identify(request)
        return await handler(request)

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[with_request_id, openai_errors, authorised])
    app.add_routes(admin_routes(service))
    app.on_response_prepare.append(tell_request_id)
    return app
