"""What handlers of the admin API share: who asks, and what they work with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from farfill.gateway.reload import Reloaded
from farfill.registry.api_keys import KeyDigests
from farfill.registry.key_store import KeyStore
from farfill.registry.records import AuditRecord


@dataclass(frozen=True, slots=True)
class Admin:
    """Who asks: `name` as the audit log shows it; whether it may change anything."""

    name: str
    may_write: bool


ADMIN = web.RequestKey("admin", Admin)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """`reload` reads the cluster file and keys again, and raises ConfigError; `key_store` None: there are no keys.

    `key_audit`: changes of keys that the registry's audit log does not have.
    """

    reload: Callable[[], Reloaded]
    key_store: KeyStore | None
    digests: KeyDigests
    key_audit: Callable[[], Awaitable[list[AuditRecord]]] | None = None


def changed_by(request: web.Request) -> str:
    """Who asks, for the audit log."""
    return request[ADMIN].name
