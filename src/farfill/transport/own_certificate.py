"""Whether a certificate is good for this process: it shakes hands with itself, in memory, as its peers will do."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from farfill.core.errors import ConfigError
from farfill.transport.errors import IdentityError
from farfill.transport.tls import PeerIdentity, certificate_identity, client_context, server_context

# Two flights each way are all of TLS 1.3.
_MAX_TURNS = 8


class CertificateRefusedError(ConfigError):
    """Certificate and key fit together, but peers would not accept them."""

    reason = "certificate_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCertificate:
    """What this process must prove to be. `cert` and `ca`: where they come from, for messages.

    `serves` and `dials`: whether peers see it as a server's, and as a client's; a PKI may issue it for one only.
    """

    identity: PeerIdentity
    cert: str
    ca: str
    serves: bool = True
    dials: bool = True

    def check(self, cert_pem: bytes, key_pem: bytes, ca_pem: bytes) -> None:
        """Chain, validity now, and identity.

        Raises ConfigError when the PEMs do not fit together, CertificateRefusedError when peers would refuse them.
        """
        server, client = server_context(cert_pem, key_pem, ca_pem), client_context(cert_pem, key_pem, ca_pem)
        if not self.serves:
            client.verify_mode = ssl.CERT_NONE
        if not self.dials:
            server.verify_mode = ssl.CERT_NONE
        try:
            seen_by_client, seen_by_server = _shake_hands(server, client)
            found = certificate_identity(seen_by_client if self.serves else seen_by_server)
        except ssl.SSLCertVerificationError as error:
            raise CertificateRefusedError(
                f"tls.cert {self.cert}: {error.verify_message}, when checked against tls.ca {self.ca}"
            ) from error
        except (ssl.SSLError, IdentityError) as error:
            raise CertificateRefusedError(f"tls.cert {self.cert}: {error}") from error
        if found != self.identity:
            raise CertificateRefusedError(
                f"tls.cert {self.cert}: is of {found.uri}, but this process is {self.identity.uri}"
            )


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[object, object]:
    """Certificates as the client and as the server saw them. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = client.wrap_bio(to_client, to_server)
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    busy = [dialling, serving]
    for _ in range(_MAX_TURNS):
        for end in list(busy):
            try:
                end.do_handshake()
                busy.remove(end)
            except ssl.SSLWantReadError:
                continue
    if busy:
        raise ssl.SSLError("the handshake does not come to an end")
    return dialling.getpeercert(), serving.getpeercert()
