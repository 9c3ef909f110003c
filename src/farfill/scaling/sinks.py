"""Who is told of changes: a report, a webhook with a signed body, the scale subresource of Kubernetes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import aiohttp
import msgspec

from farfill.core.errors import ConfigError, FarfillError
from farfill.policy.scaling import ScalingChange
from farfill.scaling.file import AutoscaleFile, KubernetesSection, WebhookSection

TRIES = 4
FIRST_PAUSE_S = 0.5
LEAST_SECRET_BYTES = 16
SIGNATURE_HEADER = "X-Farfill-Signature"
TIMESTAMP_HEADER = "X-Farfill-Timestamp"
Pause = Callable[[float], Awaitable[None]]


class ScalingFailedError(FarfillError):
    """Somebody who should have been told was not."""

    reason = "scaling_failed"
    retryable = True


class Sink(Protocol):
    """Told of changes; `unix_s` is when they were decided."""

    name: str

    async def tell(self, changes: tuple[ScalingChange, ...], unix_s: float) -> None:
        """Raises ScalingFailedError when it could not be done."""
        ...


def described(change: ScalingChange) -> dict[str, object]:
    """As it is reported and sent."""
    return {
        "site": change.group.site,
        "role": change.group.role,
        "before": change.before,
        "after": change.after,
        "reason": str(change.reason),
        "converted": change.converted,
        "utilisation": round(change.utilisation, 4),
    }


class WebhookSink:
    """POSTs {"decided_unix_s", "changes"}. The signature is HMAC-SHA256 over TIMESTAMP.BODY: receivers compare it and
    refuse old timestamps. Repeats carry the same Idempotency-Key."""

    name = "webhook"

    def __init__(self, section: WebhookSection, session: aiohttp.ClientSession, pause: Pause = asyncio.sleep) -> None:
        self._section = section
        self._session = session
        self._pause = pause
        self._secret = _read(section.secret_file, "webhook.secret_file").strip()
        if len(self._secret) < LEAST_SECRET_BYTES:
            raise ConfigError(f"webhook.secret_file: {section.secret_file} has fewer than {LEAST_SECRET_BYTES} bytes")

    async def tell(self, changes: tuple[ScalingChange, ...], unix_s: float) -> None:
        body = msgspec.json.encode({"decided_unix_s": unix_s, "changes": [described(c) for c in changes]})
        stamp = str(int(unix_s))
        headers = {
            "Content-Type": "application/json",
            TIMESTAMP_HEADER: stamp,
            SIGNATURE_HEADER: sign(self._secret, stamp, body),
            "Idempotency-Key": hashlib.sha256(body).hexdigest()[:32],
        }

        async def post() -> aiohttp.ClientResponse:
            return await self._session.post(self._section.url, data=body, headers=headers)

        await _until_done(post, f"webhook {self._section.url}", self._pause)


class KubernetesSink:
    """PATCHes .../scale of each group's deployment. Needs the verb patch on deployments/scale, nothing else."""

    name = "kubernetes"

    def __init__(self, file: AutoscaleFile, session: aiohttp.ClientSession, pause: Pause = asyncio.sleep) -> None:
        assert file.kubernetes is not None
        self._file = file
        self._section = file.kubernetes
        self._session = session
        self._pause = pause
        self._context = _context(file.kubernetes)

    async def tell(self, changes: tuple[ScalingChange, ...], unix_s: float) -> None:
        for change in changes:
            await self._scale(change)

    async def _scale(self, change: ScalingChange) -> None:
        group = self._file.groups[str(change.group)]
        section = self._section
        where = f"{section.namespace}/{group.kind}/{group.deployment}/scale"
        url = f"{section.api.rstrip('/')}/apis/apps/v1/namespaces/{where}"
        body = msgspec.json.encode({"spec": {"replicas": change.after}})

        async def patch() -> aiohttp.ClientResponse:
            token = _read(section.token_file, "kubernetes.token_file").decode().strip()  # tokens are rotated
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
            return await self._session.patch(url, data=body, headers=headers, ssl=self._context)

        await _until_done(patch, f"kubernetes {group.kind}/{group.deployment}", self._pause)


def sign(secret: bytes, stamp: str, body: bytes) -> str:
    """What the signature header must be."""
    return "sha256=" + hmac.new(secret, stamp.encode() + b"." + body, hashlib.sha256).hexdigest()


async def _until_done(call: Callable[[], Awaitable[aiohttp.ClientResponse]], what: str, pause: Pause) -> None:
    """Again after a pause that doubles, when there was no answer, or 429 or 5xx. Other refusals stand."""
    told = ""
    for attempt in range(TRIES):
        if attempt:
            await pause(FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            async with await call() as response:
                if response.status < 300:
                    return
                told = f"HTTP {response.status} {(await response.text())[:200]}"
                if response.status < 500 and response.status != 429:
                    break
        except (aiohttp.ClientError, TimeoutError) as error:
            told = str(error) or type(error).__name__
    raise ScalingFailedError(f"{what}: {told}")


def _context(section: KubernetesSection) -> ssl.SSLContext | bool:
    if section.ca_file is None or section.api.startswith("http://"):
        return True
    try:
        return ssl.create_default_context(cafile=str(section.ca_file))
    except OSError as error:
        raise ConfigError(f"kubernetes.ca_file: {section.ca_file}: {error}") from error


def _read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error
