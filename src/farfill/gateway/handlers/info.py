"""Everything that is not generation: models, tokens, health, metrics, and what the gateway believes."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from aiohttp import web

import farfill
from farfill.core.cluster import Role
from farfill.core.errors import InvalidRequestError
from farfill.gateway.handlers.body import read_body
from farfill.gateway.handlers.conversation import Conversations
from farfill.gateway.links import SiteLink
from farfill.gateway.openai.requests import DetokenizeBody, TokenizeBody, parse
from farfill.gateway.pipeline.tokenize import detokenize, tokenize_text
from farfill.gateway.service import GatewayService

MAX_WAIT_S = 60.0


class InfoHandler:
    """Serves the small endpoints."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._config = service.deps.config
        self._model = service.deps.model
        self._conversations = Conversations(
            service.pool, service.deps.model, service.deps.config.model, service.renderer
        )
        self._started_unix_s = int(service.deps.clock.unix_s())

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._one_model),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
            web.get("/health", self._alive),
            web.get("/live", self._alive),
            web.get("/ready", self._ready),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            web.get("/v1/farfill/requests/{request_id}", self._request_record),
            web.get("/v1/farfill/instances", self._instances),
            web.get("/v1/farfill/rollout", self._rollout),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return _json(self._model_card())

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        with self._service.admission.slot():
            ids = await self._token_ids(body)
        texts = [self._model.token_text(i) for i in ids] if body.return_token_strs else None
        limit = self._model.context_tokens
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), DetokenizeBody)
        self._check_model(body.model)
        with self._service.admission.slot():
            text = await detokenize(self._service.pool, self._model, "tokens", body.tokens)
        return _json({"prompt": text})

    async def _token_ids(self, body: TokenizeBody) -> list[int]:
        if body.messages is None:
            special = body.add_special_tokens is not False
            return await tokenize_text(self._service.pool, self._model, body.prompt or "", add_special_tokens=special)
        return await self._conversations.prompt_of(body)

    async def _alive(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        away_s = self._service.deps.registry_away_s()
        registry = f"away for {away_s:.0f} s; serving with the workers known last" if away_s > 0 else "ok"
        if self._service.placer.decode_ready(self._service.reach.lost):
            return _json({"status": "ready", "registry": registry})
        missing = f"no decode instance of {self._config.model.name} is ready and reachable"
        return _json({"status": "not ready", "missing": missing, "registry": registry}, 503)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": farfill.__version__})

    async def _metrics(self, _: web.Request) -> web.Response:
        body, content_type = self._service.deps.metrics()
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
        return _json(record)

    async def _instances(self, _: web.Request) -> web.Response:
        shown = []
        for instance in self._service.deps.membership.instances():
            entry = asdict(instance)
            entry["outstanding_tokens"] = self._service.work.tokens(instance)
            entry["outstanding_requests"] = self._service.work.requests(instance)
            if instance.role is not Role.DECODE:
                entry["breaker"] = str(self._service.health.state(instance))
            shown.append(entry)
        return _json(
            {
                "instances": shown,
                "sites": {link.site: self._far_site(link) for link in self._service.links.sites()},
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
        return _json({"shares": shares, "registry": registry, "gateway": "" if shared is None else shared.gateway})

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._config.model.name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "farfill",
            "max_model_len": self._service.placer.context_tokens(self._model.context_tokens),
        }

    def _check_model(self, model: str | None) -> None:
        served = self._config.model.name
        if model is not None and model != served:
            raise InvalidRequestError(
                f"model {model!r} does not exist; this server has {served!r}", param="model", reason="model_not_found"
            )


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
