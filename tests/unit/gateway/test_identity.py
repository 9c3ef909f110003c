"""A gateway talks to a worker only when the certificate is exactly that worker's."""

from __future__ import annotations

import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from farfill.gateway.identity import worker_context
from farfill.transport.tls import server_context

Pem = tuple[bytes, bytes]


class Authority:
    """A throw-away CA."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")])
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.pem = certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, uri: str) -> Pem:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "leaf")])
        builder = self._builder(subject, key).add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
        )
        certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate, private

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
        )


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Both ends in memory; raises what the client's handshake raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=name)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for end in (near, far):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    near.do_handshake()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def contexts(authority: Authority, server_uri: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    mine = authority.issue("farfill://c/near/gateway/gateway")
    theirs = authority.issue(server_uri)
    return worker_context(*mine, authority.pem, "c"), server_context(*theirs, authority.pem)


def test_the_right_worker_is_accepted(authority: Authority) -> None:
    handshake(*contexts(authority, "farfill://c/near/decode/decode-near"), "decode-near")


@pytest.mark.parametrize(
    "uri",
    [
        "farfill://c/far/prefill/prefill-far",
        "farfill://other/near/decode/decode-near",
        "farfill://c/near/registry/decode-near",
        "spiffe://c/near/decode/decode-near",
    ],
)
def test_anybody_else_is_refused_in_the_handshake(authority: Authority, uri: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(*contexts(authority, uri), "decode-near")


def test_another_authority_is_refused(authority: Authority) -> None:
    client, _ = contexts(authority, "farfill://c/near/decode/decode-near")
    _, server = contexts(Authority(), "farfill://c/near/decode/decode-near")
    with pytest.raises(ssl.SSLError):
        handshake(client, server, "decode-near")
