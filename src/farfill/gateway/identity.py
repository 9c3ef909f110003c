"""TLS to workers that proves who answers before a byte of a prompt leaves.

The name of the instance that is dialled goes along as TLS server name; the handshake fails unless the
certificate carries exactly that instance's identity. Addresses may change; identities do not.
"""

from __future__ import annotations

import ssl

from farfill.core.cluster import Instance, Role
from farfill.transport.errors import IdentityError
from farfill.transport.tls import certificate_identity, client_context

_WORKER_ROLES = frozenset(str(role) for role in Role)


def worker_context(cert_pem: bytes, key_pem: bytes, ca_pem: bytes, cluster: str) -> ssl.SSLContext:
    """A client context for `workers.WorkerClient`. Raises ConfigError when the PEMs do not fit together."""

    class IdentityCheckedObject(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            _check(self, cluster)

    context = client_context(cert_pem, key_pem, ca_pem)
    context.sslobject_class = IdentityCheckedObject
    return context


def server_name(instance: Instance) -> str:
    """What to dial `instance` as, so that the handshake checks for it."""
    return instance.name


def _check(tls: ssl.SSLObject, cluster: str) -> None:
    try:
        found = certificate_identity(tls.getpeercert())
    except IdentityError as error:
        raise ssl.SSLCertVerificationError(str(error)) from error
    if found.cluster != cluster or found.role not in _WORKER_ROLES or found.name != tls.server_hostname:
        raise ssl.SSLCertVerificationError(f"{found.uri} answered for worker {tls.server_hostname!r} of {cluster}")
