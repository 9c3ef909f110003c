"""The control API of a worker: which route needs whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from farfill.core.cluster import Role
from farfill.engine.protocol import EngineInfo
from farfill.wire.blocks import BLOCKS_PATH
from farfill.worker.blocks import BlockService
from farfill.worker.decode import DecodeService
from farfill.worker.held import HeldService
from farfill.worker.http import Handler, guard, message_response
from farfill.worker.keep import KeepService
from farfill.worker.media import RenderService
from farfill.worker.prefill import PrefillService

MAX_BODY_BYTES = 64 * 1024 * 1024


class WorkerInfo(msgspec.Struct, kw_only=True):
    """GET /v1/info."""

    name: str
    role: str
    site: str
    engine: str
    model: str
    fingerprint: str
    max_context_tokens: int
    kv_bytes_per_token: int
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeps:
    """What the routes need; built by `worker.serve`."""

    cluster: str
    name: str
    role: Role
    site: str
    info: EngineInfo
    prefill: PrefillService | None
    decode: DecodeService | None
    render: RenderService
    keep: KeepService
    held: HeldService | None = None
    blocks: BlockService
    is_ready: Callable[[], bool]
    exposition: Callable[[], tuple[bytes, str]]


def build_worker_app(deps: WorkerDeps) -> web.Application:
    """Health and metrics for every certificate of the cluster; work for gateways alone."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)

    def for_gateway(handler: Handler) -> Handler:
        return guard(handler, cluster=deps.cluster, roles=frozenset({"gateway"}))

    async def alive(_: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def ready(_: web.Request) -> web.StreamResponse:
        good = deps.is_ready()
        return web.json_response({"status": "ready" if good else "not ready"}, status=200 if good else 503)

    async def metrics(_: web.Request) -> web.StreamResponse:
        body, content_type = deps.exposition()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def info(_: web.Request) -> web.StreamResponse:
        return message_response(_worker_info(deps))

    app.router.add_get("/health", alive)
    app.router.add_get("/live", alive)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/info", for_gateway(info))
    app.router.add_post("/v1/render", for_gateway(deps.render.handle))
    app.router.add_post("/v1/prefixes", for_gateway(deps.keep.handle))
    app.router.add_get(BLOCKS_PATH, for_gateway(deps.blocks.handle))
    app.on_shutdown.append(deps.blocks.close)
    if deps.prefill is not None:
        app.router.add_post("/v1/prefill", for_gateway(deps.prefill.handle))
    if deps.held is not None:
        # Decode workers ask for what a stock router told them of.
        decoders = frozenset({str(Role.DECODE), str(Role.MIXED)})
        push = guard(deps.held.push, cluster=deps.cluster, roles=decoders)
        app.router.add_post("/v1/exports/{transfer_id}/push", push)
    if deps.decode is not None:
        app.router.add_post("/v1/decode", for_gateway(deps.decode.handle))
        app.router.add_post("/v1/transfers/{transfer_id}/fail", for_gateway(deps.decode.fail_transfer))
        app.router.add_post("/v1/transfers/{transfer_id}/continue", for_gateway(deps.decode.continue_transfer))
        app.router.add_get("/v1/transfers/{transfer_id}", for_gateway(deps.decode.transfer_status))
    return app


def _worker_info(deps: WorkerDeps) -> WorkerInfo:
    return WorkerInfo(
        name=deps.name,
        role=str(deps.role),
        site=deps.site,
        engine=deps.info.engine,
        model=deps.info.model,
        fingerprint=deps.info.fingerprint,
        max_context_tokens=deps.info.max_context_tokens,
        kv_bytes_per_token=deps.info.layout.bytes_per_token,
        transport="tcp+tls1.3",
    )
