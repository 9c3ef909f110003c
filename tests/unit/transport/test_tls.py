"""Identities in certificates, and contexts from PEM bytes."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import pytest

from farfill.core.errors import ConfigError
from farfill.transport.errors import IdentityError
from farfill.transport.tls import PeerIdentity, certificate_identity, client_context, parse_identity, server_context
from support.pki import make_pki


def test_identity_is_read_from_its_uri_and_written_back() -> None:
    identity = parse_identity("farfill://prod/near/decode/decode-1")
    assert identity == PeerIdentity("prod", "near", "decode", "decode-1")
    assert parse_identity(identity.uri) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "farfill://",
        "farfill://c/s/r",
        "farfill://c/s/r/n/x",
        "farfill:///s/r/n",
        "farfill://c//r/n",
        "http://c/s/r/n",
    ],
)
def test_other_uris_are_no_identity(uri: str) -> None:
    with pytest.raises(IdentityError):
        parse_identity(uri)


@pytest.mark.parametrize(
    "certificate",
    [
        None,
        {},
        {"subjectAltName": (("DNS", "farfill://c/s/r/n"),)},
        {"subjectAltName": (("URI", "spiffe://c/s"),)},
        {"subjectAltName": (("URI", "farfill://c/s/r/n"), ("URI", "farfill://c/s/r/other"))},
    ],
)
def test_certificate_needs_exactly_one_identity(certificate: object) -> None:
    with pytest.raises(IdentityError):
        certificate_identity(certificate)


def test_identity_may_stand_beside_other_names() -> None:
    names = (("DNS", "localhost"), ("URI", "spiffe://x/y"), ("URI", "farfill://c/s/r/n"))
    assert certificate_identity({"subjectAltName": names}).name == "n"


def test_contexts_demand_a_certificate_and_tls_1_3(tmp_path: Path) -> None:
    credentials = make_pki(tmp_path).name("decode-near")
    for context in (credentials.server(), credentials.client()):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert not credentials.client().check_hostname
    assert client_context(*credentials.pems, check_hostname=True).check_hostname


def test_private_key_does_not_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = make_pki(tmp_path / "pki").name("decode-near")
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    server_context(*credentials.pems)
    with pytest.raises(ConfigError):
        server_context(b"no certificate", credentials.pems[1], credentials.pems[2])
    assert list(folder.iterdir()) == []


def test_pems_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pki = make_pki(tmp_path)
    one, two = pki.name("one"), pki.name("two")
    with pytest.raises(ConfigError):
        client_context(one.cert.read_bytes(), two.key.read_bytes(), pki.ca.read_bytes())
    with pytest.raises(ConfigError):
        client_context(*one.pems[:2], b"no CA")
