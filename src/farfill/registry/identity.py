"""TLS to the registry that proves it is the registry before anything is said: no other role can pose as it."""

from __future__ import annotations

import ssl

from farfill.transport.errors import IdentityError
from farfill.transport.tls import client_context, peer_identity


def registry_context(cert_pem: bytes, key_pem: bytes, ca_pem: bytes, cluster: str) -> ssl.SSLContext:
    """A client context for `registry.client`. Raises ConfigError when the PEMs do not fit together."""

    class IdentityCheckedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            _check(self, cluster)

    context = client_context(cert_pem, key_pem, ca_pem)
    context.sslobject_class = IdentityCheckedObject
    return context


def _check(tls: ssl.SSLObject, cluster: str) -> None:
    try:
        found = peer_identity(tls)
    except IdentityError as error:
        raise ssl.SSLCertVerificationError(str(error)) from error
    if (found.cluster, found.role) != (cluster, "registry"):
        raise ssl.SSLCertVerificationError(f"{found.uri} answered where the registry of {cluster} was expected")
