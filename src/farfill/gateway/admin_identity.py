"""Who may use the admin API: an admin key, or a client certificate of the cluster whose identity is listed."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from aiohttp import web

from farfill.config.access import AdminConfig
from farfill.gateway.access import Access, credential_of
from farfill.gateway.access_source import Networks, parse_address
from farfill.gateway.admin import READING
from farfill.gateway.admin_parts import Admin
from farfill.gateway.errors import ForbiddenError, UnauthorisedError
from farfill.transport.errors import IdentityError
from farfill.transport.tls import PeerIdentity, peer_identity


class AdminIdentity:
    """Call it with a request; it is an `admin.Identify`."""

    def __init__(self, config: AdminConfig, cluster: str, access: Access | None) -> None:
        self._config = config
        self._cluster = cluster
        self._access = access
        self._allow_from = Networks.of(config.allow_from, "admin.allow_from")

    async def __call__(self, request: web.Request) -> Admin:
        """Raises UnauthorisedError, ForbiddenError, or KeysUnavailableError."""
        admin = self._who(request)
        if request.method not in READING and not admin.may_write:
            raise ForbiddenError(f"{admin.name} may look, but not change anything", cause="scope")
        return admin

    def _who(self, request: web.Request) -> Admin:
        if not self._allow_from.allows(parse_address(request.remote)):
            raise ForbiddenError("not from this address", cause="source", reason="source_not_allowed")
        if self._access is not None and "Authorization" in request.headers:
            record = self._access.identify_admin(credential_of(request.headers, request.remote))
            return Admin(f"key:{record.id}" + (f" ({record.name})" if record.name else ""), record.scope == "admin")
        peer = _certificate(request)
        if peer is None or peer.cluster != self._cluster:
            raise UnauthorisedError(
                "show a client certificate of the cluster, or an admin key", cause="missing", reason="missing_api_key"
            )
        path = f"{peer.site}/{peer.role}/{peer.name}"
        if not _fits(path, self._config.certificates) and not _fits(path, self._config.monitors):
            raise ForbiddenError("this certificate may not use the admin API", cause="scope")
        return Admin(f"certificate:{path}", _fits(path, self._config.certificates))


def _fits(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _certificate(request: web.Request) -> PeerIdentity | None:
    tls = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    if tls is None or not tls.getpeercert():
        return None
    try:
        return peer_identity(tls)
    except IdentityError:
        return None
