"""A renewed certificate that peers would refuse is refused here first, and the old one stays in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from farfill.config.secrets import TlsMaterial
from farfill.core.errors import ConfigError
from farfill.transport.certificates import CertificateWatch
from farfill.transport.own_certificate import CertificateRefusedError, OwnCertificate
from farfill.transport.tls import PeerIdentity
from support.authority import Authority
from support.pki import CLUSTER, Pki, make_pki

NAME = "decode-near"
OWN = OwnCertificate(
    identity=PeerIdentity(CLUSTER, "near", "decode", NAME), cert="file:pki/decode-near.pem", ca="file:pki/ca.pem"
)
Pems = tuple[bytes, bytes, bytes]


def wrong_ca(pki: Pki, folder: Path) -> Pems:
    cert, key, _ = make_pki(folder / "other").name(NAME).pems
    return cert, key, pki.ca.read_bytes()


def expired(pki: Pki, _: Path) -> Pems:
    return pki.valid_between(NAME, -3, -1).pems


def not_yet_valid(pki: Pki, _: Path) -> Pems:
    return pki.valid_between(NAME, 1, 3).pems


def other_name(pki: Pki, _: Path) -> Pems:
    return pki.name("decode-other").pems


def other_role(pki: Pki, _: Path) -> Pems:
    return pki.name(NAME, role="gateway").pems


def other_site(pki: Pki, _: Path) -> Pems:
    return pki.name(NAME, site="far").pems


def no_identity(pki: Pki, _: Path) -> Pems:
    return pki.name(NAME, uri="https://elsewhere/").pems


BAD = [
    (wrong_ca, "issuer certificate, when checked against tls.ca file:pki/ca.pem"),
    (expired, "certificate has expired"),
    (not_yet_valid, "certificate is not yet valid"),
    (other_name, f"is of farfill://test/near/decode/decode-other, but this process is {OWN.identity.uri}"),
    (other_role, "is of farfill://test/near/gateway/decode-near"),
    (other_site, "is of farfill://test/far/decode/decode-near"),
    (no_identity, "has 0 farfill:// names"),
]


def test_good_certificate_is_accepted_also_among_several_cas(tmp_path: Path) -> None:
    cert, key, ca = make_pki(tmp_path / "pki").name(NAME).pems
    OWN.check(cert, key, ca)
    OWN.check(cert, key, make_pki(tmp_path / "other").ca.read_bytes() + ca)


@pytest.mark.parametrize(("bad", "why"), BAD)
def test_what_peers_would_refuse_is_refused_with_file_and_reason(
    bad: Callable[[Pki, Path], Pems], why: str, tmp_path: Path
) -> None:
    with pytest.raises(CertificateRefusedError) as caught:
        OWN.check(*bad(make_pki(tmp_path / "pki"), tmp_path))
    assert str(caught.value).startswith("tls.cert file:pki/decode-near.pem: ")
    assert why in str(caught.value)


@pytest.mark.parametrize("ends", [{"serves": False}, {"dials": False}])
def test_one_end_is_enough_to_see_a_bad_certificate(ends: dict[str, bool], tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")
    own = OwnCertificate(identity=OWN.identity, cert=OWN.cert, ca=OWN.ca, **ends)
    own.check(*pki.name(NAME).pems)
    for bad, why in ((wrong_ca, "issuer"), (other_name, "decode-other")):
        with pytest.raises(CertificateRefusedError, match=why):
            own.check(*bad(pki, tmp_path))


def test_key_of_another_certificate_is_no_refusal_but_unusable(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")
    (cert, _, ca), (_, key, _) = pki.name(NAME).pems, pki.name("decode-other").pems
    with pytest.raises(ConfigError, match="do not fit") as caught:
        OWN.check(cert, key, ca)
    assert not isinstance(caught.value, CertificateRefusedError)


def test_refused_certificate_is_told_once_and_a_good_one_is_taken_later(tmp_path: Path) -> None:
    pki = make_pki(tmp_path / "pki")
    disk, used, outcomes = [TlsMaterial(*pki.name(NAME).pems)], list[TlsMaterial](), list[str]()

    def use(found: TlsMaterial) -> None:
        OWN.check(found.cert_pem, found.key_pem, found.ca_pem)
        used.append(found)

    watch = CertificateWatch(disk[0], lambda: disk[0], use, outcomes.append)
    first = disk[0]
    with structlog.testing.capture_logs() as logged:
        for bad in (wrong_ca, expired):
            disk[0] = TlsMaterial(*bad(pki, tmp_path))
            assert not watch.check()
            assert not watch.check()
        assert used == []
        disk[0] = first
        assert not watch.check(), "the one in use"
        good = disk[0] = TlsMaterial(*pki.valid_between(NAME, -1, 5).pems)
        assert watch.check()
        assert not watch.check()
    assert used == [good]
    assert [entry["event"] for entry in logged] == ["certificates_refused"] * 2 + ["certificates_replaced"]
    assert "issuer" in logged[0]["detail"]
    assert "expired" in logged[1]["detail"]
    assert outcomes == ["refused", "refused", "replaced"]


def test_certificate_without_a_ca_file_of_its_own_authority_is_refused(tmp_path: Path) -> None:
    """The CA was replaced on disk before the certificate: nobody who follows suit would accept it."""
    cert, key, _ = make_pki(tmp_path / "pki").name(NAME).pems
    with pytest.raises(CertificateRefusedError, match=r"tls\.ca file:pki"):
        OWN.check(cert, key, Authority().pem)
