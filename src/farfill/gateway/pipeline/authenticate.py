"""Whose request it is, and of which conversation. The tenant is what the key or token says; where the API is open, a
trusted proxy may name it in a header."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from farfill.core.errors import InvalidRequestError
from farfill.gateway.principal import Principal

DEFAULT_TENANT = "default"
MAX_SALT_CHARS = 256
SESSION_HEADER = "X-Session-ID"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Caller(msgspec.Struct, frozen=True):
    """`salt` separates prefix reuse: equal prompts share KV only under an equal salt. `session`: "" if none."""

    tenant: str
    salt: str
    session: str = ""


def authenticate(
    cache_salt: str | None,
    headers: Mapping[str, str] | None = None,
    tenant_header: str = "",
    user: object = None,
    principal: Principal | None = None,
) -> Caller:
    """The caller of a request. Names of tenants and salts of keys have neither colon nor tilde, so that a salt cannot
    imitate another tenant's.

    Raises InvalidRequestError on a salt or tenant name that is none.
    """
    if cache_salt is not None and not 0 < len(cache_salt) <= MAX_SALT_CHARS:
        raise InvalidRequestError(f"cache_salt has 1 to {MAX_SALT_CHARS} characters", param="cache_salt")
    headers = headers or {}
    session = _session(headers.get(SESSION_HEADER) or user)
    if principal is not None and principal.tenant:
        return Caller(principal.tenant, salt_of(principal.tenant, cache_salt, principal.salt), session)
    tenant = (headers.get(tenant_header) if tenant_header else None) or DEFAULT_TENANT
    if not _TENANT.fullmatch(tenant):
        raise InvalidRequestError(f"{tenant_header} is not the name of a tenant", param=tenant_header)
    return Caller(tenant, salt_of(tenant, cache_salt), session)


def salt_of(tenant: str, cache_salt: str | None, key_salt: str = "") -> str:
    """What separates prefix reuse of a tenant's prompts; `key_salt` is that of the caller's key."""
    own = f"{tenant}~{key_salt}" if key_salt else tenant
    return f"{own}:{cache_salt or ''}"


def _session(name: object) -> str:
    """A digest: names of people belong into no log and no record."""
    if not isinstance(name, str) or not name:
        return ""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, person=b"farfill-session").hexdigest()
