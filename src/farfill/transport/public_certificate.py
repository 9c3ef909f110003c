"""Whether a certificate for the public is good: dates, and a chain that holds who signed it.

Which CAs clients trust cannot be known here; what every client refuses can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from farfill.core.errors import ConfigError
from farfill.transport.own_certificate import CertificateRefusedError


@dataclass(frozen=True, slots=True)
class PublicCertificate:
    """`where` names its key in the cluster file, for messages."""

    where: str
    now_unix_s: Callable[[], float]

    def check(self, chain_pem: bytes) -> None:
        """Raises ConfigError when it is no certificate, CertificateRefusedError when every client would refuse it."""
        chain, now = self._chain(chain_pem), datetime.fromtimestamp(self.now_unix_s(), UTC)
        for certificate in chain:
            if certificate.not_valid_after_utc <= now:
                self._refuse(f"{_name(certificate)} expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
            if certificate.not_valid_before_utc > now:
                self._refuse(
                    f"{_name(certificate)} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
                )
        if len(chain) > 1 and not any(_signed_by(chain[0], other) for other in chain[1:]):
            self._refuse(f"{_name(chain[0])} was signed by none of the others in the file")

    def expires_unix_s(self, chain_pem: bytes) -> float:
        """When the first of the chain does. Raises ConfigError."""
        return min(certificate.not_valid_after_utc.timestamp() for certificate in self._chain(chain_pem))

    def _chain(self, chain_pem: bytes) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(chain_pem)
        except ValueError as error:
            raise ConfigError(f"{self.where}: no PEM certificate: {error}") from error

    def _refuse(self, why: str) -> None:
        raise CertificateRefusedError(f"{self.where}: {why}")


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or f"number {certificate.serial_number:x}"
