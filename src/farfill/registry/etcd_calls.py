"""Calls to etcd's JSON gateway: endpoints in turn, tokens, and errors with stable reasons.

Why not gRPC: see docs/adr/0011-registry-stores.md. Byte strings are base64 and 64-bit numbers are text in this JSON;
msgspec reads both from the declared types.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import msgspec

from farfill.registry.store import LeaseLostError, StoreError

CALL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 64 * 1024 * 1024

_NOT_FOUND, _RESOURCE_EXHAUSTED, _UNAUTHENTICATED = 5, 8, 16
_REASONS = {
    3: "invalid_request",
    4: "timeout",
    7: "forbidden",
    _RESOURCE_EXHAUSTED: "store_full",
    11: "out_of_range",
    14: "unreachable",
    _UNAUTHENTICATED: "unauthenticated",
}
_ANOTHER_MAY_DO = ("timeout", "unreachable")

Reply = TypeVar("Reply", bound=msgspec.Struct)


class EtcdFault(msgspec.Struct):
    """The body of an answer that is not 200; newer versions nest nothing else in it."""

    error: str = ""
    message: str = ""
    code: int = 0


class _Login(msgspec.Struct):
    name: str
    password: str


class _Token(msgspec.Struct):
    token: str


@dataclass
class EtcdCalls:
    """One session for all endpoints; starts with the one that answered last."""

    endpoints: Sequence[str]
    ssl_context: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = CALL_TIMEOUT_S
    _session: aiohttp.ClientSession | None = None
    _current: int = 0
    _token: str = ""
    _login: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def open(self) -> None:
        """Inside the running loop."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self.ssl_context if self.ssl_context is not None else True, limit=64),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def call(self, path: str, body: msgspec.Struct, reply: type[Reply]) -> Reply:
        """POST; raises StoreError."""
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._authorized(path, body)
                async with response:
                    data = await response.read()
                    if response.status != 200:
                        raise _fault(response.status, data)
        except TimeoutError as error:
            self._try_another()
            raise StoreError(f"etcd: no answer within {self.timeout_s:g} s", reason="timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            self._try_another()
            raise StoreError(f"etcd: {error}", reason="unreachable") from error
        except StoreError as error:
            if error.reason in _ANOTHER_MAY_DO:
                self._try_another()
            raise
        return _decode(data, reply)

    async def lines(
        self, path: str, body: msgspec.Struct, reply: type[Reply], quiet_s: float, begin_s: float
    ) -> AsyncIterator[Reply]:
        """The messages of a stream; ends when it ends, or was silent for `quiet_s`. Raises StoreError, also when it
        has not begun within `begin_s`."""
        begun = False
        try:
            async with asyncio.timeout(begin_s):
                response = await self._authorized(path, body)
            async with response:
                if response.status != 200:
                    raise _fault(response.status, await response.content.read(MAX_LINE_BYTES))
                pending = bytearray()
                while True:
                    async with asyncio.timeout(quiet_s if begun else begin_s):
                        data = await response.content.readany()
                    if not data:
                        return
                    begun = True
                    pending += data
                    if len(pending) > MAX_LINE_BYTES:
                        raise StoreError("etcd: a message without an end", reason="protocol_violation")
                    *whole, rest = bytes(pending).split(b"\n") if b"\n" in data else [bytes(pending)]
                    pending = bytearray(rest)
                    for line in whole:
                        yield _decode(line, reply)
        except TimeoutError as error:
            if begun:
                return
            self._try_another()
            raise StoreError(f"etcd: no answer within {begin_s:g} s", reason="timeout") from error
        except (aiohttp.ClientError, OSError) as error:
            self._try_another()
            raise StoreError(f"etcd: {error}", reason="unreachable") from error

    def _try_another(self) -> None:
        """Begin with the next endpoint: this one is lost, or cut off from the others."""
        self._current = (self._current + 1) % len(self.endpoints)

    async def _authorized(self, path: str, body: msgspec.Struct) -> aiohttp.ClientResponse:
        """The answer, after logging in again when the token is not (or no longer) good."""
        if self.user and not self._token:
            await self._log_in("")
        used = self._token
        response = await self._post(path, body)
        if self.user and response.status == 401:
            response.release()
            await self._log_in(used)
            response = await self._post(path, body)
        return response

    async def _log_in(self, stale: str) -> None:
        """Replace the token `stale`, once for all calls that found it so: checking a password is slow by design."""
        async with self._login:
            if self._token == stale:
                await self._fetch_token()

    async def _fetch_token(self) -> None:
        self._token = ""
        response = await self._post("/v3/auth/authenticate", _Login(self.user, self.password))
        async with response:
            data = await response.read()
            if response.status != 200:
                raise _fault(response.status, data)
        self._token = _decode(data, _Token).token

    async def _post(self, path: str, body: msgspec.Struct) -> aiohttp.ClientResponse:
        """Of the first endpoint that can be reached. What was sent to one is never sent to another."""
        assert self._session is not None, "use the store as a context manager"
        data = msgspec.json.encode(body)
        headers = {"Authorization": self._token} if self._token else {}
        tried: list[str] = []
        for offset in range(len(self.endpoints)):
            index = (self._current + offset) % len(self.endpoints)
            url = self.endpoints[index].rstrip("/")
            try:
                response = await self._session.post(url + path, data=data, headers=headers)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                tried.append(f"{url}: {str(error) or type(error).__name__}")
                continue
            self._current = index
            return response
        raise StoreError(f"etcd cannot be reached ({'; '.join(tried)})", reason="unreachable")


def _decode(data: bytes, reply: type[Reply]) -> Reply:
    try:
        return msgspec.json.decode(data, type=reply, strict=False)
    except msgspec.DecodeError as error:
        raise StoreError(f"etcd: its answer makes no sense: {error}", reason="protocol_violation") from error


def _fault(status: int, data: bytes) -> StoreError:
    try:
        fault = msgspec.json.decode(data, type=EtcdFault, strict=False)
    except msgspec.DecodeError:
        fault = EtcdFault(error=f"status {status}: {data[:200].decode(errors='replace').strip()}")
    text = fault.message or fault.error
    if "CommonName of client" in text:
        text = "its JSON API refuses a client certificate with a common name; make registry.etcd.cert without one"
    if fault.code == _NOT_FOUND and "lease" in text:
        return LeaseLostError(text)
    retryable = fault.code not in (3, 7)
    return StoreError(f"etcd: {text}", reason=_REASONS.get(fault.code, "store_unavailable"), retryable=retryable)
