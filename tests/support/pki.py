"""A throw-away CA for tests: certificates with `farfill://` identities, and ticket keys."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farfill.transport.tls import client_context, server_context

CLUSTER = "test"
_PKCS8 = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


@dataclass(frozen=True)
class Credentials:
    """One name's certificate and key, as paths; `*_pem` are their bytes."""

    cert: Path
    key: Path
    ca: Path

    @property
    def pems(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, CA)."""
        return self.cert.read_bytes(), self.key.read_bytes(), self.ca.read_bytes()

    def server(self, ca_pem: bytes | None = None) -> ssl.SSLContext:
        """Context to listen with; `ca_pem`: trust these instead."""
        cert, key, ca = self.pems
        return server_context(cert, key, ca_pem or ca)

    def client(self, ca_pem: bytes | None = None) -> ssl.SSLContext:
        """Context to dial with; `ca_pem`: trust these instead."""
        cert, key, ca = self.pems
        return client_context(cert, key, ca_pem or ca)


@dataclass
class Pki:
    """A CA in `folder`; `name(...)` issues on demand."""

    folder: Path
    _ca_key: ec.EllipticCurvePrivateKey
    _ca: x509.Certificate
    _issued: dict[str, Credentials] = field(default_factory=dict)

    @property
    def ca(self) -> Path:
        """The CA certificate."""
        return self.folder / "ca.pem"

    def name(self, name: str, *, role: str = "decode", site: str = "near", uri: str | None = None) -> Credentials:
        """Certificate and key of `name`, valid for 127.0.0.1 and localhost too; `uri` replaces the identity."""
        if name not in self._issued:
            self._issued[name] = self._issue(name, uri or f"farfill://{CLUSTER}/{site}/{role}/{name}")
        return self._issued[name]

    def without_common_name(self, name: str) -> Credentials:
        """As etcd's JSON API wants client certificates."""
        return self._issue(name, f"farfill://{CLUSTER}/near/registry/{name}", subject=x509.Name([]))

    def valid_between(self, name: str, from_hours: float, to_hours: float) -> Credentials:
        """A decode worker's, valid that long from now on; negative: before now."""
        hours = (from_hours, to_hours)
        return self._issue(name, f"farfill://{CLUSTER}/near/decode/{name}", hours=hours)

    def _issue(
        self, name: str, uri: str, subject: x509.Name | None = None, hours: tuple[float, float] = (-1, 48)
    ) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(uri), x509.DNSName("localhost")]
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(name, self._ca.subject, subject, hours)
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .sign(self._ca_key, hashes.SHA256())
        )
        paths = Credentials(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.ca)
        paths.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths.key.write_bytes(key.private_bytes(*_PKCS8))
        return paths


def make_pki(folder: Path) -> Pki:
    """A new CA whose files are in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    title = f"test CA {folder.name}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, title)])
    ca = (
        _builder(title, subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    return Pki(folder, key, ca)


def make_ticket_keys() -> tuple[bytes, bytes]:
    """(private, public) Ed25519 PEMs."""
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return key.private_bytes(*_PKCS8), public


def _builder(
    name: str, issuer: x509.Name, subject: x509.Name | None = None, hours: tuple[float, float] = (-1, 48)
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) if subject is None else subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(hours=hours[0]))
        .not_valid_after(now + datetime.timedelta(hours=hours[1]))
    )
