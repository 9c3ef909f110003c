"""The gateway's public API as the verifier uses it: exact prompts in, token ids, log-probabilities and records out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec

from farfill.core.errors import FarfillError
from farfill.gateway.records import RequestRecord

FORCE_HEADER = "x-farfill-force-placement"
PLACEMENT_HEADER = "x-farfill-placement"
FALLBACK_HEADER = "x-farfill-fallback"
REASON_HEADER = "x-farfill-reason"
LOSSY_HEADER = "x-farfill-kv-lossy"
RECORD_WAIT_S = 10.0

ForcedPlacement = Literal["remote", "local"]
TokenLogprob = tuple[str, float]


class GatewayUnreachableError(FarfillError):
    """Nothing answers at the gateway's address."""

    reason = "gateway_unreachable"
    retryable = True
    side = "gateway"


class GatewayRefusedError(FarfillError):
    """The gateway answered with an error; `status` and `code` are the answer's."""

    reason = "gateway_refused"
    side = "gateway"

    def __init__(self, message: str, *, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model the gateway offers and how many tokens prompt and output may have together."""

    name: str
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What to ask for. `temperature` 0 is greedy; `salt` keeps runs out of each other's prefix cache."""

    prompt: Sequence[int]
    max_tokens: int
    salt: str
    forced: ForcedPlacement | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = True
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished generation. `logprobs` are of the chosen tokens, `top` the alternatives by position.

    `lossy` is the form KV travelled in; empty: exact.
    """

    request_id: str
    placement: str
    reason: str
    fallback: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[TokenLogprob, ...], ...]
    text: str
    lossy: str = ""


@dataclass(frozen=True, slots=True)
class Door:
    """An address of a gateway and what opens it. `tls` None: the system's CAs. `key` "": none is shown."""

    url: str
    key: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class GatewayAccess:
    """`admin`: where records are, if not at the public address. `model` "": the first one offered."""

    public: Door
    admin: Door | None = None
    model: str = ""


class GatewayClient:
    """One gateway. Errors are `GatewayUnreachableError` or `GatewayRefusedError`."""

    def __init__(self, access: GatewayAccess, session: aiohttp.ClientSession) -> None:
        self.url = access.public.url.rstrip("/")
        self._access = access
        self._session = session
        self._model: ServedModel | None = None

    async def model(self) -> ServedModel:
        """The model asked for; looked up once."""
        if self._model is None:
            wanted = self._access.model
            body = await self._json("GET", f"/v1/models/{quote(wanted)}" if wanted else "/v1/models")
            try:
                card = body if wanted else body["data"][0]
                self._model = ServedModel(card["id"], card["max_model_len"])
            except (LookupError, TypeError):
                raise GatewayRefusedError(f"no Farfill gateway at {self.url}", status=200, code="unknown") from None
        return self._model

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        body = await self._json("POST", "/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens})
        return body["tokens"]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; the gateway refuses ids that are not in the vocabulary."""
        return (await self._json("POST", "/detokenize", {"tokens": list(token_ids)}))["prompt"]

    async def complete(self, generation: Generation, *, request_id: str | None = None) -> Answer:
        """Run `generation` to its end, not streamed."""
        async with await self._open(generation, stream=False, request_id=request_id) as response:
            choice = (await response.json())["choices"][0]
            return _answer(response.headers, choice)

    @contextlib.asynccontextmanager
    async def stream(self, generation: Generation, *, request_id: str | None = None) -> AsyncIterator[StreamedAnswer]:
        """Run `generation` streamed; leaving the block early closes the connection, as a client that goes away."""
        async with await self._open(generation, stream=True, request_id=request_id) as response:
            yield StreamedAnswer(response)

    async def record(self, request_id: str) -> RequestRecord:
        """What happened to a request, as gateway and workers reported it."""
        path, admin = f"/v1/farfill/requests/{request_id}?wait_s={RECORD_WAIT_S}", self._access.admin
        async with self._request("GET", path, door=admin) as response:
            return msgspec.json.decode(await response.read(), type=RequestRecord)

    async def metrics(self) -> str:
        """The gateway's metrics, in Prometheus' text format."""
        async with self._request("GET", "/metrics", door=self._access.admin) as response:
            return await response.text()

    async def _open(
        self, generation: Generation, *, stream: bool, request_id: str | None
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers: dict[str, str] = {}
        if generation.forced is not None:
            headers[FORCE_HEADER] = generation.forced
        if request_id is not None:
            headers["x-request-id"] = request_id
        body = _body(generation, (await self.model()).name, stream)
        return self._request("POST", "/v1/completions", body, headers)

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._request(method, path, body) as response:
            return await response.json()

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        door: Door | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        door = door or self._access.public
        shown = {"Authorization": f"Bearer {door.key}"} if door.key else {}
        tls = True if door.tls is None else door.tls
        try:
            async with self._session.request(
                method, door.url.rstrip("/") + path, json=body, headers={**shown, **(headers or {})}, ssl=tls
            ) as response:
                if response.status >= 400:
                    raise _refused(response.status, await response.read())
                yield response
        except (aiohttp.ContentTypeError, json.JSONDecodeError, msgspec.DecodeError) as error:
            raise GatewayRefusedError(f"no Farfill gateway at {self.url}", status=200, code="unknown") from error
        except (
            aiohttp.ClientConnectionError,
            aiohttp.ClientPayloadError,
            TimeoutError,
            asyncio.IncompleteReadError,
        ) as error:
            raise GatewayUnreachableError(
                f"no answer from the gateway at {door.url}: {error or type(error).__name__}"
            ) from error


class StreamedAnswer:
    """A generation on its way. Its headers arrive with the first token."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.placement = response.headers.get(PLACEMENT_HEADER, "")
        self.fallback = response.headers.get(FALLBACK_HEADER, "")
        self.request_id = response.headers.get("x-request-id", "")

    async def events(self) -> AsyncIterator[tuple[float, list[int]]]:
        """(loop time, token ids) of each event that brings tokens. Raises GatewayRefusedError on an error event."""
        loop = asyncio.get_running_loop()
        async for line in self._response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            message = msgspec.json.decode(line[6:])
            if "error" in message:
                raise _refused(200, line[6:])
            for choice in message["choices"]:
                if choice.get("token_ids"):
                    yield loop.time(), choice["token_ids"]


@contextlib.asynccontextmanager
async def gateway_client(access: GatewayAccess | str, *, timeout_s: float = 600.0) -> AsyncIterator[GatewayClient]:
    """A client with its own connections; a URL is a gateway that asks for nothing."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield GatewayClient(GatewayAccess(Door(access)) if isinstance(access, str) else access, session)


def _body(generation: Generation, model: str, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(generation.prompt),
        "max_tokens": generation.max_tokens,
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "ignore_eos": generation.ignore_eos,
        "cache_salt": generation.salt,
        "return_token_ids": True,
        "stream": stream,
    }
    if generation.seed is not None:
        body["seed"] = generation.seed
    if generation.logprobs is not None:
        body["logprobs"] = generation.logprobs
    return body


def _answer(headers: Any, choice: dict[str, Any]) -> Answer:
    logprobs = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    return Answer(
        request_id=headers.get("x-request-id", ""),
        placement=headers.get(PLACEMENT_HEADER, ""),
        reason=headers.get(REASON_HEADER, ""),
        fallback=headers.get(FALLBACK_HEADER, ""),
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(logprobs["token_logprobs"]),
        top=tuple(tuple(sorted(top.items(), key=lambda entry: -entry[1])) for top in logprobs["top_logprobs"]),
        text=choice["text"],
        lossy=headers.get(LOSSY_HEADER, ""),
    )


def _refused(status: int, body: bytes) -> GatewayRefusedError:
    try:
        error = msgspec.json.decode(body)["error"]
        message, code = str(error["message"]), str(error["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message, code = body[:200].decode("utf-8", "replace"), "unknown"
    return GatewayRefusedError(f"{code}: {message}", status=status, code=code)
