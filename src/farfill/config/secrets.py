"""Resolves secret references (`file:`, `env:`) of the cluster file. Values never appear in errors or logs."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from farfill.config.load import LoadedConfig
from farfill.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """PEM bytes of one role's identity and of the CA it trusts."""

    cert_pem: bytes
    key_pem: bytes = field(repr=False)
    ca_pem: bytes


def resolve_secret(reference: str, base_dir: Path, *, private: bool = False) -> bytes:
    """The bytes behind `reference`; a relative `file:` path starts at `base_dir`.

    Raises ConfigError when it is missing or empty, or when a `private` file is readable by everyone.
    """
    scheme, _, rest = reference.partition(":")
    if scheme == "file":
        value = _read_file(base_dir / rest, private=private)
    elif scheme == "env":
        text = os.environ.get(rest)
        if text is None:
            raise ConfigError(f"{reference}: the environment variable {rest} is not set")
        value = text.encode()
    elif scheme == "vault":
        raise ConfigError(f"{reference}: vault: references are not supported yet in this version; use file: or env:")
    else:
        raise ConfigError("a secret must be a reference: file:PATH or env:NAME")
    if not value.strip():
        raise ConfigError(f"{reference}: is empty")
    return value


def read_tls(loaded: LoadedConfig, name: str) -> TlsMaterial:
    """The mutual-TLS identity of `name`: a worker's name, `gateway` or `registry`."""
    tls = loaded.config.tls
    return TlsMaterial(
        cert_pem=resolve_secret(tls.cert.format(name=name), loaded.base_dir, private=False),
        key_pem=resolve_secret(tls.key.format(name=name), loaded.base_dir, private=True),
        ca_pem=resolve_secret(tls.ca, loaded.base_dir, private=False),
    )


def read_public_tls(loaded: LoadedConfig) -> tuple[bytes, bytes] | None:
    """(certificate chain, key) of the public API as PEM; None: plain HTTP."""
    gateway = loaded.config.gateway
    if gateway.tls_cert is None or gateway.tls_key is None:
        return None
    return (
        resolve_secret(gateway.tls_cert, loaded.base_dir, private=False),
        resolve_secret(gateway.tls_key, loaded.base_dir, private=True),
    )


@dataclass(frozen=True, slots=True)
class EtcdSecrets:
    """PEM bytes (None: not given) and the password of the etcd cluster."""

    ca_pem: bytes | None
    cert_pem: bytes | None
    key_pem: bytes | None = field(repr=False)
    password: str = field(repr=False)


def read_etcd(loaded: LoadedConfig) -> EtcdSecrets:
    """What `registry.etcd` refers to. Only the registry calls this."""
    etcd = loaded.config.registry.etcd
    assert etcd is not None, "checked with the file"

    def read(reference: str | None, *, private: bool = False) -> bytes | None:
        return None if reference is None else resolve_secret(reference, loaded.base_dir, private=private)

    password = read(etcd.password, private=True)
    return EtcdSecrets(
        ca_pem=read(etcd.ca),
        cert_pem=read(etcd.cert),
        key_pem=read(etcd.key, private=True),
        password="" if password is None else password.decode().rstrip("\r\n"),
    )


def read_ticket_signing_key(loaded: LoadedConfig) -> bytes:
    """Ed25519 private key (PEM). Only the gateway calls this."""
    return resolve_secret(loaded.config.tickets.signing_key, loaded.base_dir, private=True)


def read_ticket_public_key(loaded: LoadedConfig) -> bytes:
    """Ed25519 public key (PEM) that workers verify tickets with."""
    return resolve_secret(loaded.config.tickets.public_key, loaded.base_dir, private=False)


def _read_file(path: Path, *, private: bool) -> bytes:
    try:
        with path.open("rb") as file:
            if private and stat.S_IMODE(os.fstat(file.fileno()).st_mode) & stat.S_IROTH:
                raise ConfigError(f"{path}: a secret that everyone can read; run: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
