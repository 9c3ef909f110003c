"""Rollout, configuration, live gateways and the audit log over the admin API."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from aiohttp import web

import farfill
from farfill.core.errors import InvalidRequestError
from farfill.gateway.admin_parts import AdminParts, changed_by
from farfill.gateway.handlers.body import read_body
from farfill.gateway.handlers.internals import json_response
from farfill.gateway.openai.requests import parse
from farfill.gateway.service import GatewayService
from farfill.policy.rollout import STEPS
from farfill.registry.audit import audit_log, audit_put
from farfill.registry.records import AuditRecord, RolloutRecord
from farfill.registry.rollouts import ANY, ShareChange, change_share, revert_all
from farfill.registry.share_checks import check_reason, check_share
from farfill.registry.store import Store, StoreError


class ShareBody(msgspec.Struct, kw_only=True):
    """`percent` unset: by steps, with guards, from the present share on."""

    percent: float | None = None
    model: str = ANY
    tenant: str = ANY
    sticky: str | None = None
    reason: str = ""


class RevertBody(msgspec.Struct, kw_only=True):
    """Why, for the audit log."""

    reason: str = ""


class AdminChangesHandler:
    """Serves them."""

    def __init__(self, service: GatewayService, parts: AdminParts) -> None:
        self._service = service
        self._clock = service.deps.clock
        self._parts = parts

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.put("/admin/rollout", self._share),
            web.post("/admin/rollout/revert", self._revert),
            web.get("/admin/audit", self._audit),
            web.get("/admin/gateways", self._gateways),
            web.get("/admin/config", self._config),
            web.post("/admin/reload", self._reload),
        ]

    async def _share(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), ShareBody)
        if body.percent is not None and not 0 <= body.percent <= 100:
            raise InvalidRequestError("percent is between 0 and 100", param="percent")
        if body.sticky not in (None, "session", "request"):
            raise InvalidRequestError("sticky is session or request", param="sticky")
        check_reason(body.reason)
        await check_share(self._store(), (body.model, body.tenant), {m.name for m in self._service.models.all()})
        who, now_unix_s = changed_by(request), self._clock.unix_s()

        def change(found: RolloutRecord | None) -> ShareChange:
            percent, automatic = body.percent, body.percent is None
            if percent is None:
                percent = STEPS[0] if found is None or found.percent <= 0 else found.percent
            return ShareChange(percent, automatic, who, body.reason, now_unix_s, body.sticky)

        record = await change_share(self._store(), (body.model, body.tenant), change)
        assert record is not None, "a change is always made"
        return json_response({"model": body.model, "tenant": body.tenant, **msgspec.structs.asdict(record)})

    async def _revert(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request) or b"{}", RevertBody)
        check_reason(body.reason)
        reverted = await revert_all(self._store(), changed_by(request), body.reason or "revert", self._clock.unix_s())
        return json_response({"reverted": [{"model": model, "tenant": tenant} for model, tenant in reverted]})

    async def _audit(self, _: web.Request) -> web.Response:
        lines = [msgspec.structs.asdict(record) for record in await audit_log(self._store())]
        if self._parts.key_audit is not None:
            lines += [msgspec.structs.asdict(record) for record in await self._parts.key_audit()]
        return json_response({"audit": sorted(lines, key=lambda line: line["unix_s"])})

    async def _gateways(self, _: web.Request) -> web.Response:
        replicas = self._service.gate.replicas
        own = {"gateway": "", "site": self._service.deps.config.gateway.site, "version": farfill.__version__}
        if replicas is None:
            return json_response({"self": own, "others": []})
        others = [{k: v for k, v in msgspec.structs.asdict(r).items() if k != "schema"} for r in replicas.others()]
        return json_response({"self": own | {"gateway": replicas.name}, "others": others})

    async def _config(self, _: web.Request) -> web.Response:
        return json_response(self._version())

    async def _reload(self, request: web.Request) -> web.Response:
        done = self._parts.reload()
        told = {"applied": list(done.applied), "needs_restart": list(done.restart), **self._version()}
        if self._service.deps.store is not None:
            what = f"configuration read again at {self._service.deps.config.gateway.listen}: " + (
                ", ".join(done.applied) or "nothing to apply"
            )
            audit = AuditRecord(unix_s=self._clock.unix_s(), who=changed_by(request), what=what)
            await self._store().commit([audit_put(audit)])
        return json_response(told)

    def _version(self) -> dict[str, Any]:
        """What is in force, as a digest that is equal at gateways of equal files."""
        shown = self._service.reloader.config.model_dump_json()
        return {
            "version": hashlib.sha256(shown.encode()).hexdigest()[:16],
            "cluster": self._service.deps.config.cluster,
        }

    def _store(self) -> Store:
        store = self._service.deps.store
        if store is None:
            raise StoreError("this gateway has no registry")
        return store
