"""vLLM's own HTTP API in front of a worker's vLLM, for routers that know vLLM but not Farfill.

Everything goes to vLLM as it came, with one exception: what such a router writes into `kv_transfer_params`.
`do_remote_decode`: the prompt is prefilled and its KV held here; the answer says where, and the router tells decode.
`do_remote_prefill`: the KV is fetched from there first, through the transfer plane, and vLLM hears of the request when
it has landed; when it does not, vLLM prefills the prompt itself.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import msgspec
import structlog
from aiohttp import web

from farfill.core.errors import FarfillError, InvalidRequestError
from farfill.engine.protocol import PrefillWork
from farfill.engine.vllm.api import Endpoint
from farfill.engine.vllm.messages import PARAMS_KEY, prompt_digest
from farfill.wire.held import HeldPrompt
from farfill.worker.fetch import FetchService
from farfill.worker.held import HeldService
from farfill.worker.http import status_of

MAX_BODY_BYTES = 64 * 1024 * 1024
_GENERATES = ("/v1/completions", "/v1/chat/completions")
_PARAMS = "kv_transfer_params"
# What /tokenize has in common with them; the digest of the token ids finds out what else made a difference.
_TOKENIZED = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)
_HOP_HEADERS = frozenset(
    {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "content-encoding"}
)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAt:
    """The part of `wire.control.HeldPrompt` that is the same for all prompts of a worker."""

    prefill: str
    url: str
    transfer_address: str
    fingerprint: str


@dataclass(slots=True, kw_only=True)
class VllmFront:
    """One worker's. `held` where it prefills, `fetch` where it decodes."""

    where: HeldAt
    endpoint: Endpoint
    held: HeldService | None
    fetch: FetchService | None
    running: int = 0
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    async def open(self) -> None:
        """Make the session."""
        socket = self.endpoint.socket
        connector = aiohttp.TCPConnector(limit=0) if socket is None else aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        """Idempotent."""
        if self._session is not None:
            await self._session.close()

    def build_app(self) -> web.Application:
        """The API."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        try:
            raw = await request.read()
            body = _generation(request, raw)
            params = {} if body is None else body.get(_PARAMS)
            if body is not None and isinstance(params, dict):
                if params.get("do_remote_decode") and self.held is not None:
                    return await self._hold(self.held, request, raw, body)
                if params.get("do_remote_prefill") and self.fetch is not None:
                    return await self._decode(self.fetch, request, body, params)
            return await self._pass_on(request, raw)
        except FarfillError as error:
            log.warning("request_failed", path=request.path, reason=error.reason, error=str(error))
            return _error(status_of(error), error.reason, str(error))
        except aiohttp.ClientError as error:
            log.warning("vllm_unanswered", path=request.path, error=repr(error))
            return _error(503, "engine_unavailable", "vLLM does not answer")
        finally:
            self.running -= 1

    async def _hold(
        self, held: HeldService, request: web.Request, raw: bytes, body: dict[str, Any]
    ) -> web.StreamResponse:
        """Answer as soon as the prompt was taken: decode fetches its KV while it is computed."""
        prompt = await self._tokens(request, body)
        priority, salt = body.get("priority") or 0, body.get("cache_salt") or ""
        known = isinstance(priority, int) and isinstance(salt, str)
        if prompt is None or len(prompt) < 2 or not known:
            return await self._pass_on(request, raw)
        transfer_id = secrets.token_hex(16)
        work = PrefillWork(
            request_id=transfer_id,
            prompt=prompt,
            cache_salt=salt,
            priority=priority,
        )
        try:
            held.hold(transfer_id, work)
        except InvalidRequestError:  # vLLM says what is wrong, or computes what only Farfill cannot take
            return await self._pass_on(request, raw)
        where = HeldPrompt(
            transfer_id=transfer_id,
            **asdict(self.where),
            num_tokens=len(prompt) - 1,
            digest=prompt_digest(prompt),
        )
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.where.prefill,
            PARAMS_KEY: msgspec.to_builtins(where),
        }
        return web.json_response(_prefilled(request, body, prompt, params))

    async def _decode(
        self, fetch: FetchService, request: web.Request, body: dict[str, Any], params: dict[str, Any]
    ) -> web.StreamResponse:
        async with fetch.landed(params.get(PARAMS_KEY)) as ours:
            return await self._pass_on(request, json.dumps({**body, _PARAMS: ours}).encode())

    async def _tokens(self, request: web.Request, body: dict[str, Any]) -> tuple[int, ...] | None:
        """The prompt's token ids; None: several prompts, not only text, or what needs all of the prompt computed."""
        if body.get("prompt_logprobs") is not None or body.get("echo") or not _only_text(body.get("messages")):
            return None
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return tuple(prompt) if all(isinstance(token, int) for token in prompt) else None
        asked = {key: body[key] for key in _TOKENIZED if body.get(key) is not None}
        assert self._session is not None
        headers = _headers(request.headers)
        async with self._session.post(f"{self.endpoint.url}/tokenize", json=asked, headers=headers) as answer:
            if answer.status != 200:
                return None  # vLLM tells the client what is wrong with its request
            return tuple((await answer.json())["tokens"])

    async def _pass_on(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        async with self._ask(request, raw) as answer:
            response = web.StreamResponse(status=answer.status, headers=_headers(answer.headers))
            await response.prepare(request)
            try:
                async for data in answer.content.iter_any():
                    await response.write(data)
            except aiohttp.ClientError as error:
                # The status is out already: only an end without an end tells the client.
                log.warning("vllm_answer_broke_off", path=request.path, error=repr(error))
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write_eof()
            return response

    @asynccontextmanager
    async def _ask(self, request: web.Request, raw: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        url = f"{self.endpoint.url}{request.path_qs}"
        async with self._session.request(
            request.method, url, data=raw or None, headers=_headers(request.headers), allow_redirects=False
        ) as answer:
            yield answer


def _generation(request: web.Request, raw: bytes) -> dict[str, Any] | None:
    if request.method != "POST" or request.path not in _GENERATES:
        return None
    try:
        body = json.loads(raw)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _only_text(messages: Any) -> bool:
    """Whether no message has an image or the like: what stands behind placeholders is not in the token ids."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in content):
            return False
    return True


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in _HOP_HEADERS}


def _prefilled(
    request: web.Request, body: dict[str, Any], prompt: tuple[int, ...], params: dict[str, Any]
) -> dict[str, Any]:
    """What vLLM answers to a prefill, without a token: decode samples the first one."""
    chat = request.path.endswith("/chat/completions")
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    return {
        "id": f"farfill-{secrets.token_hex(8)}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model", ""),
        "choices": [{"index": 0, **empty, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": 0, "total_tokens": len(prompt)},
        _PARAMS: params,
    }


def _error(status: int, reason: str, message: str) -> web.Response:
    error = {"message": message, "type": reason, "code": status}
    return web.json_response({"error": error}, status=status, headers={"Retry-After": "1"} if status == 503 else None)
