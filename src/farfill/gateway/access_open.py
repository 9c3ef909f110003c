"""Makes `Access` from the cluster file and what it refers to."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Callable

from farfill.clock import Clock
from farfill.config.access import AccessConfig, JwtConfig
from farfill.config.load import LoadedConfig
from farfill.config.secrets import resolve_secret
from farfill.core.errors import ConfigError
from farfill.gateway.access import Access, Observe
from farfill.gateway.access_keys import FileKeys, KeyBook, RegistryKeys
from farfill.gateway.access_tokens import ReadKeys, TokenVerifier, file_reader, url_reader
from farfill.registry.api_keys import KeyDigests
from farfill.registry.store import Store


def open_access(
    loaded: LoadedConfig, store: Store, clock: Clock, observe: Observe, counted: Callable[[int], None]
) -> Access | None:
    """None without an access section. Raises ConfigError on a secret, network or CA that cannot be used."""
    config = loaded.config.access
    if config is None:
        return None
    readers = {name: _reader(loaded, name, issuer) for name, issuer in config.jwt.items()}
    return Access(
        config,
        book=_book(loaded, config, store, counted),
        tokens=TokenVerifier(config.jwt, readers, clock) if readers else None,
        digests=key_digests(loaded),
        clock=clock,
        observe=observe,
    )


def key_digests(loaded: LoadedConfig) -> KeyDigests:
    """As `access.pepper` says. Raises ConfigError."""
    access = loaded.config.access
    if access is None or access.pepper is None:
        return KeyDigests()
    return KeyDigests(resolve_secret(access.pepper, loaded.base_dir, private=True).strip())


def _book(loaded: LoadedConfig, config: AccessConfig, store: Store, counted: Callable[[int], None]) -> KeyBook | None:
    if config.keys == "none":
        return None
    if config.keys == "file":
        return FileKeys(loaded.base_dir / config.keys_file, counted)
    return RegistryKeys(store, counted)


def _reader(loaded: LoadedConfig, name: str, issuer: JwtConfig) -> ReadKeys:
    if issuer.jwks.startswith("file:"):
        return file_reader(functools.partial(resolve_secret, issuer.jwks, loaded.base_dir))
    if issuer.jwks_ca is None:
        return url_reader(issuer.jwks, None)
    try:
        ca = resolve_secret(issuer.jwks_ca, loaded.base_dir).decode("ascii")
        return url_reader(issuer.jwks, ssl.create_default_context(cadata=ca))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"access.jwt.{name}.jwks_ca: not a PEM certificate: {error}") from error
