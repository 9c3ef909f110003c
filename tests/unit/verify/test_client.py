"""The verifier's client at an address where something else answers."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from farfill.verify.client import Door, GatewayAccess, GatewayRefusedError, gateway_client


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


async def test_each_door_is_shown_its_own_key() -> None:
    seen: dict[str, str] = {}

    async def answer(request: web.Request) -> web.Response:
        seen[request.path] = request.headers.get("Authorization", "")
        cards = [{"id": "a", "max_model_len": 1}, {"id": "b", "max_model_len": 2}]
        return web.json_response(cards[1] if request.path.endswith("/b") else {"data": cards})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as public, TestServer(app) as admin:
        doors = Door(str(public.make_url("/")), "of clients"), Door(str(admin.make_url("/")), "of operators")
        async with gateway_client(GatewayAccess(*doors, "b")) as client:
            assert (await client.model()).context_tokens == 2
            await client.metrics()
        assert seen == {"/v1/models/b": "Bearer of clients", "/metrics": "Bearer of operators"}
        seen.clear()
        async with gateway_client(str(public.make_url("/"))) as client:
            assert (await client.model()).name == "a"
            await client.metrics()
        assert seen == {"/v1/models": "", "/metrics": ""}
