"""The admin API of a gateway, for commands that run anywhere: TLS, and an admin key."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from farfill.config.secrets import resolve_secret
from farfill.core.errors import ConfigError, FarfillError, InvalidRequestError
from farfill.transport.call_errors import call_error_text

TIMEOUT_S = 10.0


def trusting(option: str, ca: str) -> ssl.SSLContext:
    """For servers whose certificate `ca` (file:PATH) signed; "": the system's. Raises ConfigError."""
    try:
        return ssl.create_default_context(cadata=resolve_secret(ca, Path()).decode("ascii") if ca else None)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{option}: {ca}: not a PEM certificate: {error}") from error


class AdminClient:
    """`url` is https://host:port; `key` and `ca` are references (file:PATH, env:NAME), `ca` "" means the system's."""

    def __init__(self, url: str, key: str, ca: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname or parts.path not in ("", "/"):
            raise ConfigError(f"--admin: {url!r} is not https://HOST:PORT")
        if not key:
            raise ConfigError("--admin needs --admin-key, such as env:FARFILL_ADMIN_KEY or file:admin.key")
        self.url = url.rstrip("/")
        self.key = resolve_secret(key, Path(), private=True).decode("utf-8", "replace").strip()
        self.tls = trusting("--admin-ca", ca)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer. Raises FarfillError with what the gateway said."""
        return asyncio.run(self._call(method, path, body))

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, self.url + path, json=body, ssl=self.tls, allow_redirects=False) as response,
            ):
                answer = json.loads(await response.read() or b"{}")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise FarfillError(f"{self.url}: {_unanswered(error)}", reason="unreachable", retryable=True) from error
        if not isinstance(answer, dict) or response.status >= 300:
            raise _refused(self.url, response.status, answer)
        return answer


def _unanswered(error: Exception) -> str:
    if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError):
        return "what answers there is no admin API; is it admin.listen of a gateway?"
    return call_error_text(error, TIMEOUT_S, "say with --admin-ca file:PATH which CA signed it")


def _refused(url: str, status: int, answer: object) -> FarfillError:
    """What the gateway said; of a wrong call in the words it has here."""
    told = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(told, dict):
        return FarfillError(f"{url}: answered with status {status}, and no word why", reason="failed")
    message, reason = str(told.get("message", f"status {status}")), str(told.get("code", "failed"))
    if status in (400, 404):
        return InvalidRequestError(message, reason=reason)
    return FarfillError(message, reason=reason)
