"""What a gateway knows and believes: metrics, request records, instances, rollout shares.

On the admin API always, on the public address only where `gateway.internals` says so.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import asdict

import msgspec
from aiohttp import web

from farfill.core.cluster import Role
from farfill.core.errors import InvalidRequestError
from farfill.gateway.links import SiteLink
from farfill.gateway.service import GatewayService

MAX_WAIT_S = 60.0


class InternalsHandler:
    """Serves them."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """All of them; none changes anything."""
        return [
            web.get("/metrics", self._metrics),
            web.get("/v1/farfill/requests/{request_id}", self._request_record),
            web.get("/v1/farfill/instances", self._instances),
            web.get("/v1/farfill/rollout", self._rollout),
        ]

    async def _metrics(self, _: web.Request) -> web.Response:
        found = self._service.deps.metrics()
        body, content_type = await found if isinstance(found, Awaitable) else found
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _request_record(self, request: web.Request) -> web.Response:
        text = request.query.get("wait_s", "0")
        try:
            wait_s = float(text)
        except ValueError:
            wait_s = -1.0
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise InvalidRequestError(f"wait_s must be a number between 0 and {MAX_WAIT_S:g}", param="wait_s")
        request_id = request.match_info["request_id"]
        record = await self._service.records.get(request_id, wait_s)
        if record is None:
            raise InvalidRequestError(
                f"no finished request {request_id!r} among the last ones (wait_s waits for it)", reason="not_found"
            )
        return json_response(record)

    async def _instances(self, _: web.Request) -> web.Response:
        shown = []
        for instance in self._service.deps.membership.instances():
            entry = asdict(instance)
            entry["outstanding_tokens"] = self._service.work.tokens(instance)
            entry["outstanding_requests"] = self._service.work.requests(instance)
            if instance.role is not Role.DECODE:
                entry["breaker"] = str(self._service.health.state(instance))
            shown.append(entry)
        return json_response(
            {
                "instances": shown,
                "sites": {link.site: self._far_site(link) for link in self._service.links.all_sites()},
                "threshold_tokens": self._service.threshold.tokens,
                "requests_in_progress": self._service.admission.in_progress,
            }
        )

    def _far_site(self, link: SiteLink) -> dict[str, object]:
        """What is believed of a far site and the link from it; null where nothing was measured yet."""
        return {
            "breaker": str(self._service.health.site_state(link.site)),
            "link_bytes_per_s": link.rate.value,
            "link_rtt_s": link.rtt.value,
            "link_utilisation": self._service.links.utilisation(link.site),
            "bandwidth": str(link.regime.state),
            "prefill_s_per_token": link.prefill_s_per_token.value,
        }

    async def _rollout(self, _: web.Request) -> web.Response:
        shares = [
            {"model": model, "tenant": tenant, **msgspec.structs.asdict(record)}
            for (model, tenant), record in sorted(self._service.rollout.records.items())
        ]
        shared = self._service.shared
        away_s = 0.0 if shared is None else shared.stale_s
        registry = f"away for {away_s:.0f} s; these were the shares then" if away_s > 0 else "ok"
        return json_response(
            {"shares": shares, "registry": registry, "gateway": "" if shared is None else shared.gateway}
        )


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
