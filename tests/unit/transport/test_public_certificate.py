"""A certificate for the public that every client would refuse is refused here first."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from farfill.core.errors import ConfigError
from farfill.transport.certificates import CertificateWatch
from farfill.transport.own_certificate import CertificateRefusedError
from farfill.transport.public_certificate import PublicCertificate
from support.pki import Pki, make_pki

NOW = PublicCertificate("gateway.tls_cert file:x.pem", time.time)


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return make_pki(tmp_path / "pki")


def test_good_one_passes_with_and_without_its_chain(pki: Pki) -> None:
    cert, _, ca = pki.name("gateway").pems
    NOW.check(cert)
    NOW.check(cert + ca)
    assert NOW.expires_unix_s(cert) > time.time()


@pytest.mark.parametrize(("hours", "why"), [((-2, -1), "expired on"), ((1, 2), "is valid from")])
def test_expired_or_early_one_is_refused(pki: Pki, hours: tuple[int, int], why: str) -> None:
    with pytest.raises(CertificateRefusedError, match=rf"gateway.tls_cert file:x.pem: .*{why}"):
        NOW.check(pki.valid_between("worker", *hours).cert.read_bytes())


def test_chain_of_another_is_refused(pki: Pki, tmp_path: Path) -> None:
    other = make_pki(tmp_path / "other").ca.read_bytes()
    with pytest.raises(CertificateRefusedError, match="signed by none of the others"):
        NOW.check(pki.name("gateway").cert.read_bytes() + other)


def test_what_is_no_certificate_is_told(pki: Pki) -> None:
    with pytest.raises(ConfigError, match="no PEM certificate"):
        NOW.check(b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")


def test_expired_renewal_leaves_the_old_one_in_use(pki: Pki) -> None:
    good, bad = pki.name("gateway").cert.read_bytes(), pki.valid_between("late", -2, -1).cert.read_bytes()
    found, used, told = [good], [good], list[str]()

    def use(pem: bytes) -> None:
        NOW.check(pem)
        used.append(pem)

    watch = CertificateWatch(good, lambda: found[-1], use, told.append)
    found.append(bad)
    assert not watch.check()
    assert (used, told) == ([good], ["refused"])
    renewed = pki.name("renewed").cert.read_bytes()
    found.append(renewed)
    assert watch.check()
    assert (used, told) == ([good, renewed], ["refused", "replaced"])
