"""Everything that is not generation and anybody may ask: models, tokens, health."""

from __future__ import annotations

from aiohttp import web

import farfill
from farfill.core.errors import InvalidRequestError
from farfill.gateway.handlers.body import read_body
from farfill.gateway.handlers.conversation import Conversations
from farfill.gateway.handlers.internals import json_response
from farfill.gateway.openai.requests import DetokenizeBody, TokenizeBody, parse
from farfill.gateway.pipeline.tokenize import detokenize, tokenize_text
from farfill.gateway.service import GatewayService


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
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return json_response(self._model_card())

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        with self._service.admission.slot():
            ids = await self._token_ids(body)
        texts = [self._model.token_text(i) for i in ids] if body.return_token_strs else None
        limit = self._model.context_tokens
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), DetokenizeBody)
        self._check_model(body.model)
        with self._service.admission.slot():
            text = await detokenize(self._service.pool, self._model, "tokens", body.tokens)
        return json_response({"prompt": text})

    async def _token_ids(self, body: TokenizeBody) -> list[int]:
        if body.messages is None:
            special = body.add_special_tokens is not False
            return await tokenize_text(self._service.pool, self._model, body.prompt or "", add_special_tokens=special)
        return await self._conversations.prompt_of(body)

    async def _alive(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        away_s = self._service.deps.registry_away_s()
        registry = f"away for {away_s:.0f} s; serving with the workers known last" if away_s > 0 else "ok"
        if self._service.placer.decode_ready(self._service.reach.lost):
            return json_response({"status": "ready", "registry": registry})
        missing = f"no decode instance of {self._config.model.name} is ready and reachable"
        return json_response({"status": "not ready", "missing": missing, "registry": registry}, 503)

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"version": farfill.__version__})

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
