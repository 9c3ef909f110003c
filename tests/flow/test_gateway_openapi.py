"""The OpenAPI document has every route of the application, and nothing else; its limits are those of the checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from farfill.gateway.app import SERVICE, build_app
from farfill.gateway.openapi import INTERNAL, PUBLIC, RANGES, document
from farfill.gateway.service import GatewayDeps
from farfill.gateway.tokenizer import load_tokenizer
from support.gateway_harness import StubMembership, make_config, running_gateway
from support.stub_worker import sign_stub_ticket
from support.tiny_tokenizer import write_model_folder


def routes(app: web.Application) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:
            found.add((route.method.lower(), route.resource.canonical.replace(":.+}", "}")))
    return found


@pytest.mark.parametrize(("sections", "operations"), [({}, (*PUBLIC, *INTERNAL)), ({"access": {}}, PUBLIC)])
async def test_document_has_all_routes_and_no_other(
    tmp_path: Path, sections: dict[str, Any], operations: tuple[Any, ...]
) -> None:
    path = write_model_folder(tmp_path / "model")
    deps = GatewayDeps(
        config=make_config(path, **sections),
        model=load_tokenizer(path),
        membership=StubMembership(),
        sign_ticket=sign_stub_ticket,
        worker_tls=None,
    )
    app = build_app(deps)
    assert routes(app) == {(operation.method, operation.template) for operation in operations}
    service = app[SERVICE]
    service.pool.close()
    service.renderer.loader.close()


async def test_document_is_served_and_says_how_to_authenticate(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        status, told, _ = await gateway.get("/openapi.json")
    assert status == 200
    assert told["openapi"].startswith("3.1")
    assert told["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            codes = set(operation["responses"])
            assert {"200", "401", "403", "429"} <= codes, (method, path)


BODIES = document(PUBLIC)["components"]["schemas"]


@pytest.mark.parametrize("name", sorted(RANGES))
def test_range_is_that_of_a_field(name: str) -> None:
    assert any(name in BODIES[body]["properties"] for body in ("ChatBody", "CompletionBody"))


def beyond() -> list[tuple[str, float]]:
    """A value just outside of each documented range."""
    steps = (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0))
    return [(name, limits[at] + step) for name, limits in RANGES.items() for at, step in steps if at in limits]


async def test_value_beyond_the_documented_range_is_refused_by_name(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        for name, value in beyond():
            body: dict[str, Any] = {"model": "tiny", "prompt": "x", name: value}
            path = "/v1/completions"
            if name == "top_logprobs":
                body = {**body, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
                del body["prompt"]
                path = "/v1/chat/completions"
            status, answer, _ = await gateway.post(path, body)
            assert (status, answer["error"]["param"]) == (400, name), (value, answer)
