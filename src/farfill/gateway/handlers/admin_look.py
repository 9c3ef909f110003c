"""The admin API for those who look: the life of a request."""

from __future__ import annotations

from aiohttp import web

from farfill.core.errors import InvalidRequestError
from farfill.gateway.handlers.internals import MAX_WAIT_S
from farfill.gateway.service import GatewayService


class AdminLookHandler:
    """Changes nothing."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [web.get("/admin/requests/{request_id}", self._request)]

    async def _request(self, request: web.Request) -> web.Response:
        try:
            wait_s = float(request.query.get("wait_s", "0"))
        except ValueError:
            wait_s = -1.0
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise InvalidRequestError(f"wait_s must be a number between 0 and {MAX_WAIT_S:g}", param="wait_s")
        request_id = request.match_info["request_id"]
        life = await self._service.lookup.find(request_id, wait_s=wait_s)
        if life is None:
            raise InvalidRequestError(
                f"no gateway has a request {request_id!r} among its last ones; each keeps so many and no more",
                reason="not_found",
            )
        return web.Response(body=life, content_type="application/json")
