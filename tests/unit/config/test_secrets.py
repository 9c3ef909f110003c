"""Secret references resolve from files and the environment, and never leak their value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farfill.config.load import load_config
from farfill.config.paths import cache_dir, child_environment
from farfill.config.secrets import read_public_tls, read_ticket_signing_key, read_tls, resolve_secret
from farfill.core.errors import ConfigError


def test_file_reference_is_relative_to_the_cluster_file(cluster_file: Path):
    pki = cluster_file.parent / "pki"
    pki.mkdir()
    for name in ("ca.pem", "registry.pem", "registry.key", "ticket.key"):
        (pki / name).write_text(name)
        (pki / name).chmod(0o600)
    loaded = load_config(cluster_file)
    tls = read_tls(loaded, "registry")
    assert (tls.cert_pem, tls.key_pem, tls.ca_pem) == (b"registry.pem", b"registry.key", b"ca.pem")
    assert b"registry.key" not in repr(tls).encode()
    assert read_ticket_signing_key(loaded) == b"ticket.key"
    assert read_public_tls(loaded) is None


def test_world_readable_private_key_is_refused(tmp_path: Path):
    key = tmp_path / "a.key"
    key.write_text("k")
    key.chmod(0o644)
    assert resolve_secret("file:a.key", tmp_path, private=False) == b"k"
    with pytest.raises(ConfigError, match="chmod 600"):
        resolve_secret("file:a.key", tmp_path, private=True)


def test_environment_reference_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FARFILL_TEST_KEY", "value")
    assert resolve_secret("env:FARFILL_TEST_KEY", tmp_path, private=True) == b"value"
    monkeypatch.delenv("FARFILL_TEST_KEY")
    with pytest.raises(ConfigError, match="FARFILL_TEST_KEY is not set"):
        resolve_secret("env:FARFILL_TEST_KEY", tmp_path, private=True)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("file:none", "No such file"),
        ("file:empty", "is empty"),
        ("vault:kv/x", "not supported yet"),
        ("hunter2", "must be a reference"),
    ],
)
def test_unusable_reference_is_refused_without_its_value(tmp_path: Path, reference: str, message: str):
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_secret(reference, tmp_path, private=False)
    assert "hunter2" not in str(caught.value)


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/farfill")
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_dir() == Path.home() / ".cache" / "farfill"


def test_child_environment_adds_to_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FARFILL_TEST_A", "ours")
    assert child_environment({"B": "2"}).items() >= {("FARFILL_TEST_A", "ours"), ("B", "2")}


def test_nothing_outside_config_reads_the_environment():
    package = Path(__file__).parents[3] / "src" / "farfill"
    read = re.compile(r"getenv\(|os\.environ(?!\.setdefault\()")
    readers = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if file.parent.name != "config" and read.search(file.read_text())
    }
    assert readers == set()
