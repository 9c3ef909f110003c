"""The admin API beside a running gateway: its TLS, its credentials, its server."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Callable

import structlog

from farfill.cli.run_role import http_server, plain_runner
from farfill.config.access import AdminConfig
from farfill.config.load import LoadedConfig
from farfill.config.secrets import TlsMaterial, resolve_secret
from farfill.gateway.access_observe import AccessObserver
from farfill.gateway.access_open import key_digests
from farfill.gateway.admin import build_admin_app
from farfill.gateway.admin_identity import AdminIdentity
from farfill.gateway.admin_parts import AdminParts
from farfill.gateway.reload import Reloaded
from farfill.gateway.service import GatewayService
from farfill.registry.key_file import KeyFile
from farfill.registry.key_store import FileKeyStore, KeyStore, RegistryKeyStore
from farfill.transport.certificates import ServerContext
from farfill.transport.tls import http_server_context

log = structlog.get_logger()


class AdminServer:
    """Serves while `running`. Its TLS follows the cluster's certificates: `use` them."""

    def __init__(
        self,
        *,
        loaded: LoadedConfig,
        config: AdminConfig,
        service: GatewayService,
        reload: Callable[[], Reloaded],
        observer: AccessObserver,
        tls: TlsMaterial,
    ) -> None:
        self._loaded = loaded
        self._config = config
        file = _key_file(loaded)
        self._context = ServerContext(self._tls(tls))
        parts = AdminParts(
            reload=reload,
            key_store=_key_store(loaded, service, file),
            digests=key_digests(loaded),
            key_audit=None if file is None else FileKeyStore(file).audit,
        )
        identify = AdminIdentity(config, loaded.config.cluster, service.deps.access)
        self._runner = plain_runner(build_admin_app(service, parts, identify, observer))

    def use(self, tls: TlsMaterial) -> None:
        """New certificates for connections to come. Raises ConfigError when they do not fit."""
        self._context.replace(self._tls(tls))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises ConfigError when its address cannot be had."""
        async with http_server(self._runner, self._config.listen, self._context.context):
            log.info("admin_listening", address=self._config.listen)
            yield

    def _tls(self, tls: TlsMaterial) -> ssl.SSLContext:
        """A client certificate is welcome, but an admin key does as well."""
        config, base = self._config, self._loaded.base_dir
        cert, key = tls.cert_pem, tls.key_pem
        if config.tls_cert is not None and config.tls_key is not None:
            cert = resolve_secret(config.tls_cert, base)
            key = resolve_secret(config.tls_key, base, private=True)
        context = http_server_context(cert, key, tls.ca_pem)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


def _key_file(loaded: LoadedConfig) -> KeyFile | None:
    access = loaded.config.access
    return KeyFile(loaded.base_dir / access.keys_file) if access is not None and access.keys == "file" else None


def _key_store(loaded: LoadedConfig, service: GatewayService, file: KeyFile | None) -> KeyStore | None:
    access, store = loaded.config.access, service.deps.store
    if file is not None:
        return FileKeyStore(file)
    if access is None or access.keys == "none" or store is None:
        return None
    return RegistryKeyStore(store)
