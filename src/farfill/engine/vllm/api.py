"""vLLM's API for token ids, over a Unix socket or at a URL: `/inference/v1/generate`, or else `/v1/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from farfill.core.errors import EngineError, InvalidRequestError
from farfill.core.sampling import SamplingParams
from farfill.engine.vllm.completions import from_completion, to_completion

_DATA = b"data: "
_GENERATE = "/inference/v1/generate"
_RENDER = "/v1/chat/completions/render"
_PROBE_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a vLLM answers: at `url`, through `socket` if there is one, to whoever has `api_key` if it wants one."""

    url: str = "http://vllm"
    socket: Path | None = None
    api_key: str = field(default="", repr=False)

    def __str__(self) -> str:
        return str(self.socket) if self.socket is not None else self.url


def sampling_fields(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """`sampling` as vLLM names it. Stop strings are not among them: text is made here.

    Raises InvalidRequestError for what vLLM cannot do without a tokenizer.
    """
    if sampling.bad_words:
        raise InvalidRequestError("bad_words needs engine.type torch", param="bad_words")
    fields: dict[str, Any] = {
        "n": sampling.n,
        "max_tokens": max_tokens,
        "min_tokens": min(sampling.min_tokens, max_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logprobs": sampling.logprobs,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.allowed_token_ids:
        fields["allowed_token_ids"] = list(sampling.allowed_token_ids)
    if sampling.grammar:
        fields["structured_outputs"] = {"grammar": sampling.grammar}
    return fields


class VllmApi:
    """One vLLM server. Use on one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None
        self._completions_model = ""

    async def open(self) -> None:
        """Make the session."""
        socket, key = self._endpoint.socket, self._endpoint.api_key
        connector = aiohttp.TCPConnector(limit=0) if socket is None else aiohttp.UnixConnector(str(socket), limit=0)
        headers = {"Authorization": f"Bearer {key}"} if key else None
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)

    async def find_dialect(self) -> None:
        """Ask which of its endpoints for token ids it has open. Raises EngineError, ConfigError for a wrong key."""
        assert self._session is not None
        try:
            async with asyncio.timeout(_PROBE_S):
                async with self._session.post(f"{self._endpoint.url}{_GENERATE}", json={}) as response:
                    status = response.status
                if status not in (403, 404):
                    return  # it complains of what is missing in the body
                async with self._session.get(f"{self._endpoint.url}/v1/models") as response:
                    body = await response.read()
                    if response.status != 200:
                        raise _refusal(response.status, body)
                    self._completions_model = json.loads(body)["data"][0]["id"]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            raise EngineError(f"vLLM does not say what it serves: {error or 'timeout'}") from error

    @property
    def tokens_only(self) -> bool:
        """Whether its endpoint for tokens, and that for rendering, are open."""
        return not self._completions_model

    async def close(self) -> None:
        """Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def once(self, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer of one request. Cancelling withdraws it."""
        async with self._post(body) as response:
            return self._read(await response.read())

    async def render(self, body: dict[str, Any]) -> dict[str, Any]:
        """The tokens of a chat. Raises InvalidRequestError for what vLLM refuses."""
        assert self._session is not None
        try:
            async with self._session.post(f"{self._endpoint.url}{_RENDER}", json=body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise _refusal(response.status, answer)
                return json.loads(answer)
        except aiohttp.ClientError as error:
            raise EngineError(f"vLLM does not answer: {error}") from error

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of an answer as they come. Closing the iterator withdraws the request."""
        async with self._post({**body, "stream": True}) as response:
            async for line in response.content:
                if not line.startswith(_DATA):
                    continue
                data = line[len(_DATA) :].strip()
                if data == b"[DONE]":
                    return
                part = self._read(data)
                if "error" in part:
                    raise _failure(part)
                yield part
        raise EngineError("vLLM cut the answer short")

    async def health(self, timeout_s: float) -> int:
        """Status of /health. Raises EngineError when there is none in time."""
        return (await self._get("/health", timeout_s))[0]

    async def metrics(self, timeout_s: float) -> bytes:
        """What /metrics says. Raises EngineError when it says nothing in time."""
        return (await self._get("/metrics", timeout_s))[1]

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        assert self._session is not None
        try:
            async with asyncio.timeout(timeout_s), self._session.get(f"{self._endpoint.url}{path}") as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"vLLM does not answer {path}: {error or 'timeout'}") from error

    @contextlib.asynccontextmanager
    async def _post(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None
        path = _GENERATE
        if self._completions_model:
            path, body = "/v1/completions", to_completion(body, self._completions_model)
        try:
            async with self._session.post(f"{self._endpoint.url}{path}", json=body) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                yield response
        except aiohttp.ClientError as error:
            raise EngineError(f"vLLM does not answer: {error}") from error

    def _read(self, data: bytes) -> dict[str, Any]:
        answer = json.loads(data)
        return from_completion(answer) if self._completions_model else answer


def _refusal(status: int, body: bytes) -> Exception:
    try:
        text = _message(json.loads(body))
    except ValueError:
        text = body[:200].decode(errors="replace")
    if 400 <= status < 500:
        return InvalidRequestError(f"vLLM: {text}")
    return EngineError(f"vLLM answered {status}: {text}")


def _failure(part: dict[str, Any]) -> Exception:
    """What went wrong after a 200: only generating finds out some of what is wrong with a request."""
    error = part["error"]
    client = isinstance(error, dict) and 400 <= int(error.get("code") or 500) < 500
    return (InvalidRequestError if client else EngineError)(f"vLLM: {_message(part)}")


def _message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
