"""Nobody gets further without saying who asks, where the cluster file has an access section."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from farfill.gateway.access import credential_of
from farfill.gateway.gate import OPEN, Gate
from farfill.gateway.principal import Principal

PRINCIPAL = web.RequestKey("principal", Principal)
OPEN_PATHS = frozenset({"/health", "/live", "/ready"})
"""What load balancers ask; says nothing but whether it works."""


def entering(gate: Gate) -> Middleware:
    """Middleware; the request's `PRINCIPAL` is set after it. Every POST counts for the key's rate of requests."""

    @web.middleware
    async def enter(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if gate.access is None or request.path in OPEN_PATHS:
            return await handler(request)
        principal = await gate.identify(credential_of(request.headers, request.remote))
        request[PRINCIPAL] = principal
        if request.method == "POST":
            gate.meter.request(principal)
        return await handler(request)

    return enter


def principal_of(request: web.Request) -> Principal:
    """Who asks; `OPEN` where nobody has to say."""
    return request.get(PRINCIPAL, OPEN)
