"""The admin API: a server of its own, for those who run the gateway. Add routes in `admin_routes`.

GET asks for the right to look, everything else for the right to change; whoever has neither gets 401 or 403 before a
handler is called. `admin_parts.ADMIN` tells a handler who asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.gateway.access_observe import AccessObserver
from farfill.gateway.admin_parts import ADMIN, Admin, AdminParts
from farfill.gateway.errors import ForbiddenError, UnauthorisedError, openai_errors
from farfill.gateway.handlers.admin_changes import AdminChangesHandler
from farfill.gateway.handlers.admin_keys import AdminKeysHandler
from farfill.gateway.handlers.admin_look import AdminLookHandler
from farfill.gateway.handlers.admin_prefixes import AdminPrefixesHandler
from farfill.gateway.handlers.internals import InternalsHandler
from farfill.gateway.handlers.request_id import REQUEST_ID, tell_request_id, with_request_id
from farfill.gateway.service import GatewayService

log = structlog.get_logger("farfill.gateway")

MAX_BODY_BYTES = 1 << 20
READING = frozenset({"GET", "HEAD"})

Identify = Callable[[web.Request], Awaitable[Admin]]
"""Who asks. Raises a FarfillError when nobody who may, or when the right to change is missing."""


def admin_routes(service: GatewayService, parts: AdminParts) -> list[web.RouteDef]:
    """Everything the admin API answers."""
    keys = None if parts.key_store is None else AdminKeysHandler(parts.key_store, parts.digests, service.deps.clock)
    return [
        *InternalsHandler(service).routes(),
        *AdminLookHandler(service).routes(),
        *AdminChangesHandler(service, parts).routes(),
        *AdminPrefixesHandler(service).routes(),
        *(() if keys is None else keys.routes()),
    ]


def build_admin_app(
    service: GatewayService, parts: AdminParts, identify: Identify, observer: AccessObserver
) -> web.Application:
    """The application; `identify` runs before every handler. Changes are logged with who made them; `observer` hears
    of every call once its end is known."""

    @web.middleware
    async def counted(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        outcome = "failed"  # whatever ends it, a caller that leaves included
        try:
            response = await handler(request)
            outcome = "ok" if response.status < 400 else "failed"
            return response
        except UnauthorisedError:
            outcome = "unauthorised"
            raise
        except ForbiddenError:
            outcome = "forbidden"
            raise
        finally:
            observer.admin_called("read" if request.method in READING else "write", outcome)

    @web.middleware
    async def authorised(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        request[ADMIN] = await identify(request)
        try:
            response = await handler(request)
        except ConfigError as error:  # of a file the caller had read again
            raise InvalidRequestError(str(error), reason=error.reason) from error
        if request.method not in READING:
            log.info(
                "admin_change",
                who=request[ADMIN].name,
                method=request.method,
                path=request.path,
                status=response.status,
                request_id=request[REQUEST_ID],
            )
        return response

    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[with_request_id, openai_errors, counted, authorised]
    )
    app.add_routes(admin_routes(service, parts))
    app.on_response_prepare.append(tell_request_id)
    return app
