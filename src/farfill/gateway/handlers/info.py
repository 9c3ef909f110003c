"""Everything that is not generation and anybody may ask: models, tokens, health."""

from __future__ import annotations

from aiohttp import web

import farfill
from farfill.core.errors import InvalidRequestError
from farfill.gateway.handlers.body import read_body
from farfill.gateway.handlers.conversation import Conversations
from farfill.gateway.handlers.enter import principal_of
from farfill.gateway.handlers.internals import json_response
from farfill.gateway.models import ServedModel
from farfill.gateway.openai.requests import DetokenizeBody, TokenizeBody, parse
from farfill.gateway.pipeline.tokenize import detokenize, tokenize_text
from farfill.gateway.service import GatewayService


class InfoHandler:
    """Serves the small endpoints."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._conversations: dict[str, Conversations] = {}
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
        ]

    async def _models(self, request: web.Request) -> web.Response:
        visible = self._service.models.visible(principal_of(request))
        return json_response({"object": "list", "data": [self._model_card(served) for served in visible]})

    async def _one_model(self, request: web.Request) -> web.Response:
        served = self._service.models.find(request.match_info["model"], principal_of(request))
        return json_response(self._model_card(served))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), TokenizeBody)
        served = self._service.models.find(body.model, principal_of(request))
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        with self._service.admission.slot():
            ids = await self._token_ids(served, body)
        model = served.service.deps.model
        texts = [model.token_text(i) for i in ids] if body.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": model.context_tokens, "tokens": ids, "token_strs": texts}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), DetokenizeBody)
        served = self._service.models.find(body.model, principal_of(request))
        with self._service.admission.slot():
            text = await detokenize(self._service.pool, served.service.deps.model, "tokens", body.tokens)
        return json_response({"prompt": text})

    async def _token_ids(self, served: ServedModel, body: TokenizeBody) -> list[int]:
        deps = served.service.deps
        if body.messages is None:
            special = body.add_special_tokens is not False
            return await tokenize_text(self._service.pool, deps.model, body.prompt or "", add_special_tokens=special)
        if served.key not in self._conversations:
            self._conversations[served.key] = Conversations(
                self._service.pool, deps.model, deps.config.model, served.service.renderer
            )
        return await self._conversations[served.key].prompt_of(body)

    async def _alive(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        """Ready with one model that can be served; `missing` names the others."""
        away_s = self._service.deps.registry_away_s()
        registry = f"away for {away_s:.0f} s; serving with the workers known last" if away_s > 0 else "ok"
        models, lost = self._service.models.all(), self._service.reach.lost
        without = [served.name for served in models if not served.service.placer.decode_ready(lost)]
        told = {"registry": registry}
        if without:
            told = {"missing": f"no decode instance of {', '.join(without)} is ready and reachable", **told}
        if len(without) < len(models):
            return json_response({"status": "ready", **told})
        return json_response({"status": "not ready", **told}, 503)

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": farfill.__version__})

    def _model_card(self, served: ServedModel) -> dict[str, object]:
        service = served.service
        card: dict[str, object] = {
            "id": served.name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "farfill",
            "max_model_len": service.placer.context_tokens(service.deps.model.context_tokens),
        }
        aliases = service.deps.config.model.aliases
        return {**card, "aliases": aliases} if aliases else card
