"""The admin API for prompts' beginnings that workers are to keep KV of: system prompts, long documents, tool lists."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
from aiohttp import web

from farfill.core.cluster import Instance
from farfill.core.errors import FarfillError, InvalidRequestError
from farfill.gateway.handlers.body import read_body
from farfill.gateway.handlers.conversation import Conversations
from farfill.gateway.handlers.internals import json_response
from farfill.gateway.models import ServedModel
from farfill.gateway.openai.requests import ChatMessageBody, TokenizeBody, ToolBody, parse
from farfill.gateway.pipeline.authenticate import DEFAULT_TENANT, salt_of
from farfill.gateway.pipeline.tokenize import tokenize_text
from farfill.gateway.principal import Principal
from farfill.gateway.service import GatewayService
from farfill.wire.control import KeepPrefixCommand, KeepPrefixReply

MAX_WEIGHT = 1e6


class KeepBody(msgspec.Struct, kw_only=True):
    """PUT /admin/prefixes. The beginning as `messages` (with `tools`) of a chat, or `prompt` of a completion, and
    whose: `tenant`, the salt of its key if it has one, the `cache_salt` its requests have."""

    model: str | None = None
    messages: list[ChatMessageBody] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt: str | list[int] | None = None
    tenant: str = DEFAULT_TENANT
    key_salt: str = ""
    cache_salt: str | None = None
    pinned: bool = True
    weight: float = 1.0
    ttl_s: float = 86_400.0
    compute: bool = True


class AdminPrefixesHandler:
    """Tells every worker of the model, and answers with what each of them made of it. Workers forget at a restart."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    def routes(self) -> list[web.RouteDef]:
        """All of them."""
        return [web.put("/admin/prefixes", self._keep)]

    async def _keep(self, request: web.Request) -> web.Response:
        body = parse(await read_body(request), KeepBody)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either messages or prompt", param="messages")
        if not 0 < body.weight <= MAX_WEIGHT:
            raise InvalidRequestError(f"weight is over 0, up to {MAX_WEIGHT:g}", param="weight")
        if not (math.isfinite(body.ttl_s) and body.ttl_s >= 0):
            raise InvalidRequestError("ttl_s is at least 0 (0: as long as a worker runs)", param="ttl_s")
        served = self._service.models.find(body.model, Principal(name="admin", tenant=""))
        command = KeepPrefixCommand(
            token_ids=await self._token_ids(served, body),
            cache_salt=salt_of(body.tenant, body.cache_salt, body.key_salt),
            pinned=body.pinned,
            weight=body.weight,
            ttl_s=body.ttl_s,
            compute=body.compute,
        )
        instances = [i for i in self._service.deps.membership.instances() if i.model == served.name]
        answers = await asyncio.gather(*(self._tell(instance, command) for instance in instances))
        return json_response(
            {
                "model": served.name,
                "prompt_tokens": len(command.token_ids),
                "workers": {instance.name: answer for instance, answer in zip(instances, answers, strict=True)},
            }
        )

    async def _tell(self, instance: Instance, command: KeepPrefixCommand) -> dict[str, Any]:
        """Of one worker; one that fails keeps the others from nothing."""
        try:
            async with asyncio.timeout(self._service.deps.config.gateway.request_timeout_s):
                reply: KeepPrefixReply = await self._service.client.keep_prefix(instance, command)
        except TimeoutError:
            return {"error": "no answer in time", "reason": "timeout"}
        except FarfillError as error:
            return {"error": str(error), "reason": error.reason}
        return msgspec.structs.asdict(reply)

    async def _token_ids(self, served: ServedModel, body: KeepBody) -> list[int]:
        pool, deps = self._service.pool, served.service.deps
        if isinstance(body.prompt, list):
            return body.prompt
        if body.prompt is not None:
            return await tokenize_text(pool, deps.model, body.prompt, add_special_tokens=True)
        chat = Conversations(pool, deps.model, deps.config.model, served.service.renderer)
        return await chat.prompt_of(
            TokenizeBody(
                messages=body.messages,
                tools=body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
                add_generation_prompt=False,
            )
        )
