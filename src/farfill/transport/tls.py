"""Mutual TLS 1.3: contexts from PEM bytes, and who the other side is by its certificate.

An identity is the URI subject alternative name `farfill://<cluster>/<site>/<role>/<name>`. The cluster's own
CA vouches for it, so the network name a peer is reached at does not matter.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import structlog

from farfill.core.errors import ConfigError
from farfill.telemetry.log_limit import LimitedWarnings
from farfill.transport.errors import IdentityError

log = structlog.get_logger()

SCHEME = "farfill"


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who a certificate speaks for."""

    cluster: str
    site: str
    role: str
    name: str

    @property
    def uri(self) -> str:
        """As written in the certificate."""
        return f"{SCHEME}://{self.cluster}/{self.site}/{self.role}/{self.name}"


def parse_identity(uri: str) -> PeerIdentity:
    """Raises IdentityError unless `uri` is an identity."""
    parts = urlsplit(uri)
    path = parts.path.split("/")
    if parts.scheme != SCHEME or len(path) != 4 or path[0] or not all([parts.netloc, *path[1:]]):
        raise IdentityError(f"{uri[:200]!r} is no {SCHEME}://cluster/site/role/name identity")
    return PeerIdentity(parts.netloc, path[1], path[2], path[3])


def certificate_identity(certificate: object) -> PeerIdentity:
    """The identity in what `getpeercert()` returned. Raises IdentityError when there is none, or several."""
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    uris = [value for kind, value in names if kind == "URI" and value.startswith(f"{SCHEME}://")]
    if len(uris) != 1:
        raise IdentityError(f"the certificate has {len(uris)} {SCHEME}:// names, expected exactly 1")
    return parse_identity(uris[0])


def peer_identity(tls: ssl.SSLSocket | ssl.SSLObject) -> PeerIdentity:
    """Who is at the other end of an established TLS connection. Raises IdentityError."""
    return certificate_identity(tls.getpeercert())


def server_context(cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> ssl.SSLContext:
    """For servers: presents `cert_pem`, demands a client certificate signed by `ca_pem`.

    Raises ConfigError when the PEMs do not fit together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # sessions are never resumed: each connection proves itself afresh
    return _load(context, cert_pem, key_pem, ca_pem)


def http_server_context(cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> ssl.SSLContext:
    """`server_context` for asyncio servers, which say nothing of handshakes they refuse: this one logs them."""
    refusals = LimitedWarnings(log, "connection_refused", time.monotonic)

    class LoggedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                refusals.warning("identity_refused", detail=str(error))
                raise

    context = server_context(cert_pem, key_pem, ca_pem)
    context.sslobject_class = LoggedObject
    return context


def client_context(cert_pem: bytes, key_pem: bytes, ca_pem: bytes, *, check_hostname: bool = False) -> ssl.SSLContext:
    """For clients: presents `cert_pem`, demands a server certificate signed by `ca_pem`.

    The host name is not checked unless asked for: whoever dials compares the identity instead.
    Raises ConfigError when the PEMs do not fit together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = check_hostname
    context.verify_mode = ssl.CERT_REQUIRED
    return _load(context, cert_pem, key_pem, ca_pem)


def _load(context: ssl.SSLContext, cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.load_verify_locations(cadata=ca_pem.decode("ascii"))
        # The ssl module reads chains from files only: one that nobody else can read, gone at once.
        handle, path = tempfile.mkstemp(prefix="farfill-", suffix=".pem")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(cert_pem.rstrip() + b"\n" + key_pem)
            context.load_cert_chain(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"certificate, key and CA do not fit together: {error}") from error
    return context
