"""Certificates on disk are followed; what cannot be used changes nothing."""

from __future__ import annotations

import ssl
from pathlib import Path

from farfill.config.secrets import TlsMaterial
from farfill.core.errors import ConfigError
from farfill.worker.certificates import CertificateWatch
from support.pki import Pki, make_pki

Used = list[tuple[ssl.SSLContext, ssl.SSLContext]]


class Disk:
    """What a worker would read."""

    def __init__(self, pki: Pki) -> None:
        self.material = self.of(pki)
        self.broken = ""

    def of(self, pki: Pki) -> TlsMaterial:
        return TlsMaterial(*pki.name("decode-near").pems)

    def read(self) -> TlsMaterial:
        if self.broken:
            raise ConfigError(self.broken)
        return self.material


def watch(disk: Disk) -> tuple[CertificateWatch, Used]:
    used: Used = []
    return CertificateWatch(disk.material, disk.read, lambda server, client: used.append((server, client))), used


def test_unchanged_files_are_left_alone(tmp_path: Path) -> None:
    certificates, used = watch(Disk(make_pki(tmp_path)))
    assert not certificates.check()
    assert used == []


def test_new_certificate_is_taken_into_use_once(tmp_path: Path) -> None:
    disk = Disk(make_pki(tmp_path / "old"))
    certificates, used = watch(disk)
    disk.material = disk.of(make_pki(tmp_path / "new"))
    assert certificates.check()
    assert not certificates.check()
    ((server, client),) = used
    assert (server.verify_mode, client.verify_mode) == (ssl.CERT_REQUIRED, ssl.CERT_REQUIRED)


def test_half_written_files_change_nothing_and_are_tried_again(tmp_path: Path) -> None:
    disk = Disk(make_pki(tmp_path / "old"))
    certificates, used = watch(disk)
    old, new = disk.material, disk.of(make_pki(tmp_path / "new"))
    disk.material = TlsMaterial(new.cert_pem, old.key_pem, old.ca_pem)
    assert not certificates.check()
    disk.broken = "cannot be read"
    assert not certificates.check()
    assert used == []
    disk.broken, disk.material = "", new
    assert certificates.check()
