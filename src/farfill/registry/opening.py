"""Makes the store that the cluster file names."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator

from farfill.clock import Clock
from farfill.config.load import LoadedConfig
from farfill.config.secrets import EtcdSecrets, read_etcd
from farfill.core.errors import ConfigError
from farfill.registry.disk import FolderDisk
from farfill.registry.embedded import EmbeddedStore
from farfill.registry.etcd import QUIET_S, EtcdStore
from farfill.registry.etcd_calls import CALL_TIMEOUT_S, EtcdCalls
from farfill.registry.store import Store
from farfill.transport.tls import client_context

LEAST_BEGIN_S = 1.0
"""With very short leases: an etcd that is merely slow is not away."""


@contextlib.asynccontextmanager
async def open_store(loaded: LoadedConfig, clock: Clock) -> AsyncIterator[Store]:
    """The opened store. Raises ConfigError, and StoreError when its files are damaged."""
    if loaded.config.registry.store == "etcd":
        async with etcd_store(loaded) as store:
            yield store
        return
    disk = FolderDisk(loaded.base_dir / loaded.config.registry.data_dir)
    try:
        async with EmbeddedStore(disk, clock) as store:
            yield store
    finally:
        disk.close()


def etcd_store(loaded: LoadedConfig) -> EtcdStore:
    """Not opened yet. That etcd is away shows within about a lease. Raises ConfigError."""
    etcd = loaded.config.registry.etcd
    assert etcd is not None, "checked with the file"
    secrets = read_etcd(loaded)
    calls = EtcdCalls(tuple(etcd.endpoints), etcd_context(secrets), etcd.user, secrets.password)
    lease_s = loaded.config.registry.lease_s
    return EtcdStore(
        calls,
        f"{etcd.prefix}{loaded.config.cluster}/",
        quiet_s=min(QUIET_S, lease_s / 3),
        begin_s=min(CALL_TIMEOUT_S, max(LEAST_BEGIN_S, lease_s / 2)),
    )


def etcd_context(secrets: EtcdSecrets) -> ssl.SSLContext:
    """TLS that checks the host's name, as etcd's certificates carry it. Raises ConfigError."""
    if secrets.cert_pem is not None and secrets.key_pem is not None and secrets.ca_pem is not None:
        return client_context(secrets.cert_pem, secrets.key_pem, secrets.ca_pem, check_hostname=True)
    if secrets.cert_pem is not None:
        raise ConfigError("registry.etcd.cert needs registry.etcd.ca; add ca: file:PATH")
    try:
        ca = None if secrets.ca_pem is None else secrets.ca_pem.decode("ascii")
        return ssl.create_default_context(cadata=ca)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"registry.etcd.ca: not a PEM certificate: {error}") from error
