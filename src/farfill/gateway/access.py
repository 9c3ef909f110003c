"""Who asks: API keys and tokens, where they come from, and whether they may. Fails closed.

A client hears that its credential is wrong, not why; metrics and the log (in bounds) do. Keys of the admin API do not
count at the public one, nor the other way round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from farfill.clock import Clock
from farfill.config.access import AccessConfig
from farfill.core.errors import InvalidRequestError
from farfill.gateway.access_keys import KeyBook
from farfill.gateway.access_source import Networks, client_address
from farfill.gateway.access_tokens import TokenVerifier
from farfill.gateway.errors import ForbiddenError, KeysUnavailableError, UnauthorisedError
from farfill.gateway.principal import Principal, RateLimits
from farfill.registry.api_keys import KeyDigests, key_id
from farfill.registry.records import KeyRecord
from farfill.telemetry.log_limit import LimitedWarnings

log = structlog.get_logger("farfill.gateway")

CACHED_KEYS = 10_000

Observe = Callable[[str, str], None]
"""(credential: key, token or none; outcome: ok or why not)."""


class Headers(Protocol):
    """What is read of a request's headers."""

    def getall(self, name: str, default: Sequence[str], /) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class Credential:
    """What a request brought. `peer` is the address at the other end of its connection."""

    authorization: str | None
    peer: str | None = None
    forwarded: Sequence[str] = field(default=())


class Access:
    """Owned by the event loop; use `running` around its use."""

    def __init__(
        self,
        config: AccessConfig,
        *,
        book: KeyBook | None,
        tokens: TokenVerifier | None,
        digests: KeyDigests,
        clock: Clock,
        observe: Observe = lambda _credential, _outcome: None,
    ) -> None:
        self.book = book
        self._tokens = tokens
        self._digests = digests
        self._clock = clock
        self._observe = observe
        self._allow_from = Networks.of(config.allow_from, "access.allow_from")
        self._trusted = Networks.of(config.trusted_proxies, "access.trusted_proxies")
        self._principals: dict[str, tuple[KeyRecord, Principal]] = {}
        self._refusals = LimitedWarnings(log, "access_refused", time.monotonic)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow keys meanwhile. Raises ConfigError when a file of keys cannot be used at the start."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self.book is not None:
                    await stack.enter_async_context(self.book)
                yield
        finally:
            if self._tokens is not None:
                self._tokens.close()

    async def identify(self, credential: Credential) -> Principal:
        """Who calls the API. Raises UnauthorisedError (401), ForbiddenError (403) or KeysUnavailableError (503)."""
        with self._told(credential) as kind:
            address = client_address(credential.peer, credential.forwarded, self._trusted)
            if not self._allow_from.allows(address):
                raise ForbiddenError("not from this address", cause="source", reason="source_not_allowed")
            text = bearer(credential.authorization)
            if kind == "token" and self._tokens is not None:
                principal = await self._tokens.verify(text)
            else:
                principal = self._principal(self._key(text, ("api",)))
            if not principal.allow_from.allows(address):
                raise ForbiddenError("not from this address", cause="key_source", reason="source_not_allowed")
            return principal

    def identify_admin(self, credential: Credential) -> KeyRecord:
        """The key of the admin API that was brought. Raises as `identify`."""
        with self._told(credential):
            record = self._key(bearer(credential.authorization), ("admin", "monitor"))
            if not principal_of(record).allow_from.allows(client_address(credential.peer, (), Networks())):
                raise ForbiddenError("not from this address", cause="key_source", reason="source_not_allowed")
            return record

    def _key(self, text: str, scopes: tuple[str, ...]) -> KeyRecord:
        wanted = key_id(text)
        if wanted is None or self.book is None:
            raise UnauthorisedError(cause="malformed")
        if not self.book.known:
            raise KeysUnavailableError("the gateway has not heard of any keys yet; its registry does not answer")
        now_unix_s, record = self._clock.unix_s(), self.book.get(wanted)
        if record is None:
            raise UnauthorisedError(cause="unknown_key")
        if not self._digests.matches(text, record, now_unix_s):
            raise UnauthorisedError(cause="wrong_key")
        if record.expires_unix_s and now_unix_s >= record.expires_unix_s:
            raise UnauthorisedError("this API key has expired", cause="expired")
        if record.scope not in scopes:
            raise UnauthorisedError(cause="scope")
        return record

    def _principal(self, record: KeyRecord) -> Principal:
        known = self._principals.get(record.id)
        if known is None or known[0] is not record:
            if len(self._principals) >= CACHED_KEYS:
                self._principals.clear()
            known = self._principals[record.id] = (record, principal_of(record))
        return known[1]

    @contextlib.contextmanager
    def _told(self, credential: Credential) -> Iterator[str]:
        kind = credential_kind(credential.authorization)
        try:
            yield kind
        except (UnauthorisedError, ForbiddenError) as error:
            self._observe(kind, error.cause)
            who = key_id(bearer(credential.authorization)) if kind == "key" else None
            self._refusals.warning(error.cause, credential=kind, key=who or "", peer=credential.peer or "")
            raise
        except KeysUnavailableError as error:
            self._observe(kind, error.reason)
            raise
        self._observe(kind, "ok")


def bearer(authorization: str | None) -> str:
    """The credential in the header. Raises UnauthorisedError when there is none."""
    scheme, _, text = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise UnauthorisedError(
            "no API key provided; send it as header: Authorization: Bearer KEY",
            cause="missing",
            reason="missing_api_key",
        )
    return text.strip()


def credential_kind(authorization: str | None) -> str:
    """key, token, or none, by how it looks."""
    text = (authorization or "").strip().partition(" ")[2].strip()
    if not text:
        return "none"
    return "token" if text.count(".") == 2 else "key"


def credential_of(headers: Headers, peer: str | None) -> Credential:
    """What the headers of a request say. Raises InvalidRequestError when they bring more than one credential."""
    brought = headers.getall("Authorization", ())
    if len(brought) > 1:  # a proxy in front may have looked at the other one
        raise InvalidRequestError("more than one Authorization header; send one", param="Authorization")
    return Credential(brought[0] if brought else None, peer, headers.getall("X-Forwarded-For", ()))


def principal_of(record: KeyRecord) -> Principal:
    """What a key stands for. Raises ConfigError when one of its networks is none, which `check_key` rules out."""
    limits = RateLimits(record.requests_per_s, record.tokens_per_s, record.burst_s)
    return Principal(
        name=f"key:{record.id}",
        tenant=record.tenant,
        models=tuple(record.models),
        salt=record.salt,
        best_priority=record.priority,
        limits=limits if record.requests_per_s or record.tokens_per_s else None,
        allow_from=Networks.of(record.allow_from, f"key {record.id}"),
    )
