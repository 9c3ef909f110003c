"""The verifier's client at an address where something else answers."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from farfill.verify.client import GatewayRefusedError, gateway_client


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("<html>", "text/html"),
        ("{", "application/json"),
        ("{}", "application/json"),
        ('{"data": []}', "application/json"),
    ],
)
async def test_another_server_is_no_gateway(body: str, kind: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=body, content_type=kind)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    async with TestServer(app) as server, gateway_client(str(server.make_url("/"))) as client:
        with pytest.raises(GatewayRefusedError, match="no Farfill gateway at http://127"):
            await client.model()
