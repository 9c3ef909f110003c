"""API keys over the admin API. A key itself is told once, to whoever made it."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from farfill.clock import Clock
from farfill.core.errors import InvalidRequestError
from farfill.gateway.admin_parts import ADMIN, changed_by
from farfill.gateway.handlers.body import read_body
from farfill.gateway.handlers.internals import json_response
from farfill.gateway.openai.requests import parse
from farfill.registry.api_keys import KeyDigests, new_key, rotated, told
from farfill.registry.key_store import KeyStore
from farfill.registry.records import AuditRecord, KeyRecord
from farfill.registry.share_checks import check_reason

DEFAULT_OVERLAP_S = 0.0
MAX_OVERLAP_S = 90 * 86_400.0
HIDDEN = "***"
_SECRET_FIELDS = ("digest", "former_digest", "schema")


class NewKeyBody(msgspec.Struct, kw_only=True):
    """What a key may have; see `KeyRecord`."""

    name: str = ""
    scope: str = "api"
    tenant: str = "default"
    models: list[str] = msgspec.field(default_factory=lambda: ["*"])
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    burst_s: float = 10.0
    priority: int = -100
    salt: str = ""
    allow_from: list[str] = []
    expires_unix_s: float = 0.0
    reason: str = ""


class RotateBody(msgspec.Struct, kw_only=True):
    """For how long the present key counts on."""

    overlap_s: float = DEFAULT_OVERLAP_S
    reason: str = ""


class ReasonBody(msgspec.Struct, kw_only=True):
    """Why, for the audit log."""

    reason: str = ""


class AdminKeysHandler:
    """Serves them."""

    def __init__(self, store: KeyStore, digests: KeyDigests, clock: Clock) -> None:
        self._store = store
        self._digests = digests
        self._clock = clock

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.get("/admin/keys", self._list),
            web.post("/admin/keys", self._create),
            web.post("/admin/keys/{id}/rotate", self._rotate),
            web.delete("/admin/keys/{id}", self._revoke),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        found = [shown(record) for record in await self._store.list()]
        if not request[ADMIN].may_write:  # who knows a salt can aim at the prefixes it keeps apart
            found = [key | {"salt": HIDDEN if key["salt"] else ""} for key in found]
        return json_response({"keys": found})

    async def _create(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request) or b"{}", NewKeyBody)
        fields = msgspec.structs.asdict(body)
        why = check_reason(fields.pop("reason"))
        wanted, key = new_key()
        record = KeyRecord(
            **fields,
            id=wanted,
            digest=self._digests.digest(key),
            created_unix_s=self._clock.unix_s(),
            author=request[ADMIN].name,
        )
        await self._store.create(record, why)
        return json_response({"key": key, **shown(record)}, 201)

    async def _rotate(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request) or b"{}", RotateBody)
        if not 0 <= body.overlap_s <= MAX_OVERLAP_S:
            raise InvalidRequestError(f"overlap_s is between 0 and {MAX_OVERLAP_S:g}", param="overlap_s")
        wanted, key = new_key(request.match_info["id"])
        digest, now_unix_s = self._digests.digest(key), self._clock.unix_s()
        audit = self._audit(
            request, f"key {wanted} rotated, the former one counts for {body.overlap_s:g} s", body.reason
        )
        after = await self._store.change(
            wanted, lambda record: rotated(record, digest, body.overlap_s, now_unix_s), audit
        )
        assert after is not None, "it was changed, not removed"
        return json_response({"key": key, **shown(after)})

    async def _revoke(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request) or b"{}", ReasonBody)
        wanted = request.match_info["id"]
        await self._store.change(wanted, lambda _: None, self._audit(request, f"key {wanted} revoked", body.reason))
        return json_response({"id": wanted, "revoked": True})

    def _audit(self, request: web.Request, what: str, why: str) -> AuditRecord:
        return AuditRecord(unix_s=self._clock.unix_s(), who=changed_by(request), what=what, why=check_reason(why))


def shown(record: KeyRecord) -> dict[str, Any]:
    """Everything but the digests."""
    fields = msgspec.structs.asdict(record)
    return {k: v for k, v in fields.items() if k not in _SECRET_FIELDS} | {"told": told(record)}
