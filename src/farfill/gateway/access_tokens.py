"""Tokens (JWT) of configured issuers: signature, issuer, audience and time checked, claims mapped to a tenant.

The issuer's keys are cached, read again when old or when a token names one that is not there, and used for a day while
their host cannot be reached.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any

import aiohttp
import structlog
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, InvalidClaimError, InvalidKeyIdError, JoseError, MissingClaimError
from joserfc.jwk import KeySet

from farfill.clock import Clock
from farfill.config.access import JwtConfig
from farfill.core.errors import ConfigError
from farfill.gateway.access_source import Networks
from farfill.gateway.errors import KeysUnavailableError, UnauthorisedError
from farfill.gateway.principal import Principal

log = structlog.get_logger("farfill.gateway")

MAX_TOKEN_CHARS = 8192
MAX_JWKS_BYTES = 1 << 20
FETCH_TIMEOUT_S = 5.0
MIN_FETCH_PERIOD_S = 10.0
MAX_STALE_S = 86_400.0
CACHED_TOKENS = 10_000
MAX_TIME_UNIX_S = float(1 << 53)
WORST_PRIORITY = 100

_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_TENANT = re.compile(r"(?!t-)[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

ReadKeys = Callable[[], Awaitable[bytes]]


class IssuerKeys:
    """One issuer's public keys. Owned by the event loop."""

    def __init__(self, name: str, read: ReadKeys, refresh_s: float, clock: Clock) -> None:
        self._name = name
        self._read = read
        self._refresh_s = refresh_s
        self._clock = clock
        self._keys: KeySet | None = None
        self._read_s = -MAX_STALE_S
        self._tried_s = -MAX_STALE_S
        self._reading: asyncio.Task[None] | None = None
        self.version = 0

    async def current(self) -> KeySet:
        """Raises KeysUnavailableError when they cannot be had and none are known, or only ones a day old."""
        age_s = self._clock.now_s() - self._read_s
        if self._keys is None or age_s > MAX_STALE_S:
            await self._refresh(always=False)
        elif age_s > self._refresh_s:
            self._start(always=False)  # the old ones do meanwhile
        if self._keys is None or self._clock.now_s() - self._read_s > MAX_STALE_S:
            raise KeysUnavailableError(f"the keys of issuer {self._name} cannot be had", reason="jwks_unavailable")
        return self._keys

    async def renewed(self) -> bool:
        """Read them again because a token names an unknown one; whether that changed anything. Not all the time."""
        before = self.version
        await self._refresh(always=False)
        return self.version != before

    def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()

    async def _refresh(self, *, always: bool) -> None:
        self._start(always=always)
        if self._reading is not None:
            await asyncio.shield(asyncio.gather(self._reading, return_exceptions=True))

    def _start(self, *, always: bool) -> None:
        running = self._reading is not None and not self._reading.done()
        now_s = self._clock.now_s()
        if running or (not always and now_s - self._tried_s < MIN_FETCH_PERIOD_S):
            return
        self._tried_s = now_s
        self._reading = asyncio.create_task(self._read_now(), name=f"jwks-{self._name}")

    async def _read_now(self) -> None:
        try:
            found = KeySet.import_key_set(json.loads(await self._read()))
        except (
            OSError,
            aiohttp.ClientError,
            TimeoutError,
            ValueError,
            KeyError,
            TypeError,
            JoseError,
            ConfigError,
        ) as e:
            log.warning("jwks_not_read", issuer=self._name, error=f"{type(e).__name__}: {e}"[:300])
            return
        kids = sorted(str(key.kid) for key in found)
        if self._keys is None or found.as_dict() != self._keys.as_dict():
            self.version += 1
            log.info("jwks_read", issuer=self._name, keys=kids)
        self._keys, self._read_s = found, self._clock.now_s()


@dataclass(slots=True)
class _Issuer:
    name: str
    config: JwtConfig
    keys: IssuerKeys
    claims: jwt.JWTClaimsRegistry


class TokenVerifier:
    """Tokens of all issuers. Owned by the event loop."""

    def __init__(self, issuers: Mapping[str, JwtConfig], readers: Mapping[str, ReadKeys], clock: Clock) -> None:
        self._clock = clock
        self._issuers: dict[str, _Issuer] = {}
        for name, config in issuers.items():
            claims = jwt.JWTClaimsRegistry(
                now=lambda: int(clock.unix_s()),
                leeway=int(config.leeway_s),
                iss={"essential": True, "value": config.issuer},
                aud={"essential": True, "values": list(config.audience)},
                exp={"essential": True},
            )
            keys = IssuerKeys(name, readers[name], config.jwks_refresh_s, clock)
            self._issuers[config.issuer] = _Issuer(name, config, keys, claims)
        self._verified: OrderedDict[bytes, tuple[Principal, float, int]] = OrderedDict()

    async def verify(self, token: str) -> Principal:
        """Who it speaks for. Raises UnauthorisedError with the reason, KeysUnavailableError."""
        if len(token) > MAX_TOKEN_CHARS or not _TOKEN.fullmatch(token):
            raise UnauthorisedError(cause="jwt_malformed")
        issuer = self._issuers.get(_claimed_issuer(token))
        if issuer is None:
            raise UnauthorisedError(cause="jwt_issuer")
        digest = sha256(token.encode()).digest()
        known = self._verified.get(digest)
        keys = await issuer.keys.current()  # renews them when due, also while all tokens are known
        if known is not None and known[2] == issuer.keys.version:
            if self._clock.unix_s() >= known[1]:
                raise UnauthorisedError("this token has expired", cause="jwt_expired")
            return known[0]
        claims = await self._claims(issuer, token, keys)
        principal = _principal(issuer, claims)
        self._verified[digest] = (principal, float(claims["exp"]) + int(issuer.config.leeway_s), issuer.keys.version)
        if len(self._verified) > CACHED_TOKENS:
            self._verified.popitem(last=False)
        return principal

    def close(self) -> None:
        """Stop reading keys."""
        for issuer in self._issuers.values():
            issuer.keys.close()

    async def _claims(self, issuer: _Issuer, token: str, keys: KeySet) -> dict[str, Any]:
        try:
            try:
                found = jwt.decode(token, keys, algorithms=issuer.config.algorithms)
            except InvalidKeyIdError:
                if not await issuer.keys.renewed():
                    raise
                found = jwt.decode(token, await issuer.keys.current(), algorithms=issuer.config.algorithms)
            _check_times(found.claims)
            issuer.claims.validate(found.claims)
            return found.claims
        except ExpiredTokenError as error:
            raise UnauthorisedError("this token has expired", cause="jwt_expired") from error
        except InvalidKeyIdError as error:
            raise UnauthorisedError(cause="jwt_unknown_key") from error
        except (InvalidClaimError, MissingClaimError) as error:
            raise UnauthorisedError(cause="jwt_claims") from error
        except (JoseError, ValueError, TypeError, RecursionError) as error:
            raise UnauthorisedError(cause="jwt_signature") from error


def file_reader(path: Callable[[], bytes]) -> ReadKeys:
    """Keys of a file."""

    async def read() -> bytes:
        return await asyncio.to_thread(path)

    return read


def url_reader(url: str, context: ssl.SSLContext | None) -> ReadKeys:
    """Keys from `url`: no redirects, no proxies, bounded in time and size. `context` None: the system's CAs."""

    async def read() -> bytes:
        timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(url, allow_redirects=False, ssl=context or True) as response,
        ):
            if response.status != 200:
                raise ConfigError(f"{url} answered {response.status}")
            body = await response.content.read(MAX_JWKS_BYTES + 1)
            while len(body) <= MAX_JWKS_BYTES and (more := await response.content.read(MAX_JWKS_BYTES)):
                body += more
            if len(body) > MAX_JWKS_BYTES:
                raise ConfigError(f"{url} answered more than {MAX_JWKS_BYTES} bytes")
            return body

    return read


def _claimed_issuer(token: str) -> str:
    """What it says of itself, to know whose keys to try; "" when it says nothing."""
    payload = token.split(".")[1]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return ""
    found = claims.get("iss") if isinstance(claims, dict) else None
    return found if isinstance(found, str) else ""


def _principal(issuer: _Issuer, claims: Mapping[str, Any]) -> Principal:
    config = issuer.config
    tenant = _claim(claims, config.tenant_claim)
    if not isinstance(tenant, str) or not tenant:
        raise UnauthorisedError(cause="jwt_tenant")
    models = tuple(config.models)
    if config.models_claim:
        told = _claim(claims, config.models_claim)
        words = told.split() if isinstance(told, str) else told if isinstance(told, list) else []
        models = tuple(word for word in words if isinstance(word, str))
    name = _tenant_name(tenant)
    return Principal(
        name=f"jwt:{issuer.name}:{name}",
        tenant=name,
        models=models,
        best_priority=_best_priority(claims, config.priority_claim),
        allow_from=Networks(),
    )


def _best_priority(claims: Mapping[str, Any], path: str) -> int:
    """What the claim says; without one, any. One that is no whole number in range speaks for no priority at all."""
    found = _claim(claims, path) if path else None
    if found is None:
        return -WORST_PRIORITY
    if not _is_number(found, WORST_PRIORITY) or found != int(found):
        raise UnauthorisedError(cause="jwt_claims")
    return int(found)


def _check_times(claims: Mapping[str, Any]) -> None:
    """Times that no calendar has would overflow wherever they are computed with."""
    if not all(_is_number(claims[name], MAX_TIME_UNIX_S) for name in ("exp", "nbf", "iat") if name in claims):
        raise UnauthorisedError(cause="jwt_claims")


def _is_number(found: Any, most: float) -> bool:
    """Whether it is a number of at most `most` either way; `true` is none."""
    return isinstance(found, int | float) and not isinstance(found, bool) and abs(found) <= most


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """The claim called `path`; where there is none, dots go into objects (realm_access.tenant)."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _tenant_name(text: str) -> str:
    """`text`, or a digest where it does not look like a tenant's name; two texts never share one."""
    if _TENANT.fullmatch(text):
        return text
    return "t-" + blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12, person=b"farfill-tenant").hexdigest()
