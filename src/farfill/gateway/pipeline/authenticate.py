"""Who asks. The API is open: everybody is the tenant `default`, apart only by the salt they choose."""

from __future__ import annotations

from dataclasses import dataclass

from farfill.core.errors import InvalidRequestError

DEFAULT_TENANT = "default"
MAX_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """`salt` separates prefix reuse: equal prompts share KV only under an equal salt."""

    tenant: str
    salt: str


def authenticate(cache_salt: str | None) -> Caller:
    """The caller of a request. Tenant names have no colon, so a salt cannot imitate another tenant's."""
    if cache_salt is not None and not 0 < len(cache_salt) <= MAX_SALT_CHARS:
        raise InvalidRequestError(f"cache_salt has 1 to {MAX_SALT_CHARS} characters", param="cache_salt")
    return Caller(DEFAULT_TENANT, f"{DEFAULT_TENANT}:{cache_salt or ''}")
