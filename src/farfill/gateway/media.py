"""Images of chat requests: from `image_url` to bytes that are known to be an image, within limits.

`data:` URLs carry the image. Others are fetched, from hosts the operator named only (`gateway.media_allowed_hosts`):
never through a redirect, never from an address that is not public, never more or longer than the limits. Images are
decoded once here, in a thread, so that a broken one is the client's 400 and never a worker's failure.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from farfill.config.model import GatewayConfig
from farfill.core.errors import InvalidRequestError
from farfill.engine.media import open_image
from farfill.gateway.observe import MediaObserver
from farfill.gateway.tokenizer import TokenizerPool

MEDIA_REASONS = frozenset(
    {
        "media_fetch_failed",
        "media_invalid",
        "media_placeholder",
        "media_refused",
        "media_too_large",
        "media_too_many",
        "media_url_refused",
        "unsupported_media",
    }
)
"""Why images are refused: `reason` of the 400, and the label of `farfill_media_refused_total`."""

# They go to workers in one message, whose size is bounded there.
MAX_TOTAL_BYTES = 48 << 20
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where an image is, and the field of the request that says so."""

    url: str
    param: str


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet at large."""
    found = ipaddress.ip_address(address.split("%", maxsplit=1)[0])
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_global and not found.is_multicast


class MediaLoader:
    """Loads images. `may_reach` says which addresses may be connected to."""

    def __init__(
        self,
        config: GatewayConfig,
        observer: MediaObserver,
        may_reach: Callable[[str], bool] = is_public,
    ) -> None:
        self._allowed = {host.lower() for host in config.media_allowed_hosts}
        self._max_images = config.media_max_images
        self._max_bytes = config.media_max_mb << 20
        self._max_pixels = config.media_max_megapixels * 1_000_000
        self._timeout_s = config.media_timeout_s
        # Apart from the tokenizer's: a large image must not keep short texts waiting.
        self._pool = TokenizerPool()
        self._observer = observer
        self._may_reach = may_reach

    async def load(self, refs: Sequence[ImageRef]) -> list[bytes]:
        """The files of `refs`, each a valid image. Raises InvalidRequestError naming the field."""
        if len(refs) > self._max_images:
            raise InvalidRequestError(
                f"{len(refs)} images in one request, at most {self._max_images} (gateway.media_max_images)",
                param=refs[self._max_images].param,
                reason="media_too_many",
            )
        files: list[bytes] = []
        for ref in refs:
            files.append(await self._load(ref))
            if sum(map(len, files)) > MAX_TOTAL_BYTES:
                raise InvalidRequestError(
                    f"{ref.param}: the images of a request may have {MAX_TOTAL_BYTES >> 20} MiB together",
                    param=ref.param,
                    reason="media_too_large",
                )
        return files

    def close(self) -> None:
        """Wait for running work, drop the rest."""
        self._pool.close()

    async def _load(self, ref: ImageRef) -> bytes:
        scheme = ref.url[:6].lower()
        if scheme.startswith("data:"):
            source, data = "data", await self._pool.run(1, 0, lambda: self._decoded(ref))
        else:
            source, data = "url", await self._fetched(ref)
        await self._pool.run(1, 0, lambda: open_image(data, self._max_pixels, ref.param))
        self._observer.media_loaded(source, len(data))
        return data

    def _decoded(self, ref: ImageRef) -> bytes:
        head, comma, body = ref.url[5:].partition(",")
        kind, *options = [part.strip().lower() for part in head.split(";")]
        if not comma or not kind.startswith("image/"):
            raise InvalidRequestError(
                f"{ref.param}: a data URL of an image begins with data:image/, this one has {kind[:40] or 'no type'}",
                param=ref.param,
                reason="unsupported_media",
            )
        # Before anything is decoded: text is never shorter than its bytes.
        if len(body) > self._max_bytes * 3:
            raise self._too_large(ref)
        try:
            data = unquote_to_bytes(body)
            if "base64" in options:
                data = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequestError(
                f"{ref.param}: the data URL is not valid base64: {error}", param=ref.param, reason="media_invalid"
            ) from error
        if len(data) > self._max_bytes:
            raise self._too_large(ref)
        return data

    async def _fetched(self, ref: ImageRef) -> bytes:
        self._check_url(ref)
        connector = aiohttp.TCPConnector(
            resolver=_GuardedResolver(self._may_reach), force_close=True, use_dns_cache=False
        )
        limits = {"timeout": aiohttp.ClientTimeout(total=self._timeout_s), "cookie_jar": aiohttp.DummyCookieJar()}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, **limits) as http,
                http.get(ref.url, allow_redirects=False, headers={"Accept": "image/*"}) as response,
            ):
                if response.status != 200:
                    moved = " (redirects are not followed)" if 300 <= response.status < 400 else ""
                    raise self._failed(ref, f"its server answered {response.status}{moved}")
                data = await response.content.read(self._max_bytes + 1)
                while len(data) <= self._max_bytes and (more := await response.content.read(self._max_bytes + 1)):
                    data += more
        except TimeoutError:
            raise self._failed(ref, f"no answer within {self._timeout_s:g} s (gateway.media_timeout_s)") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # What exactly failed would tell about the network here.
            raise self._failed(ref, f"the image cannot be fetched ({type(error).__name__})") from error
        if len(data) > self._max_bytes:
            raise self._too_large(ref)
        return data

    def _check_url(self, ref: ImageRef) -> None:
        try:
            url = urlsplit(ref.url)
            scheme, host, port = url.scheme.lower(), (url.hostname or "").lower(), url.port
        except ValueError as error:
            raise self._refused(ref, f"not a URL: {error}") from error
        if scheme not in _PORTS:
            raise self._refused(ref, f"{scheme or 'no'} scheme; use data:, https: or http:")
        named = {host, f"{host}:{port or _PORTS[scheme]}"} if port in (None, _PORTS[scheme]) else {f"{host}:{port}"}
        if not host or url.username is not None or not named & self._allowed:
            raise self._refused(ref, "images are fetched from hosts in gateway.media_allowed_hosts only; or use data:")
        if _is_address(host) and not self._may_reach(host):
            raise self._refused(ref, "its address is not public")

    def _refused(self, ref: ImageRef, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{ref.param}: {why}", param=ref.param, reason="media_url_refused")

    def _failed(self, ref: ImageRef, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"{ref.param}: {why}", param=ref.param, reason="media_fetch_failed")

    def _too_large(self, ref: ImageRef) -> InvalidRequestError:
        return InvalidRequestError(
            f"{ref.param}: the image has more than {self._max_bytes >> 20} MiB (gateway.media_max_mb)",
            param=ref.param,
            reason="media_too_large",
        )


class _GuardedResolver(AbstractResolver):
    """Names resolve to addresses that may be reached; checked where the connection takes them from."""

    def __init__(self, may_reach: Callable[[str], bool]) -> None:
        self._resolver = ThreadedResolver()
        self._may_reach = may_reach

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """As `AbstractResolver.resolve`; OSError when nothing is left."""
        found = await self._resolver.resolve(host, port, family)
        left = [result for result in found if self._may_reach(result["host"])]
        if not left:
            raise OSError(f"{host} has no public address")
        return left

    async def close(self) -> None:
        """Nothing is held."""
        await self._resolver.close()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
