"""Commands as a person calls them: what they print, and their exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from farfill.cli.main import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "two-sites.yaml"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["farfill", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_example_is_valid(monkeypatch, capsys):
    assert call(monkeypatch, "config", "check", "--config", str(EXAMPLE), "--no-files") == 0
    assert "valid; 2 workers, sites far, near" in capsys.readouterr().out


def test_check_wants_the_model_unless_told_otherwise(monkeypatch, capsys, cluster_file: Path):
    assert call(monkeypatch, "config", "check", str(cluster_file)) == 2
    assert "is not a folder; run `farfill model fetch`" in capsys.readouterr().err
    assert call(monkeypatch, "config", "check", str(cluster_file), "--no-files") == 0


def test_mistakes_come_one_a_line_with_exit_code_2(monkeypatch, capsys, cluster_file: Path):
    cluster_file.write_text(cluster_file.read_text() + "routing: {fallback: true}\nengine: {threads: -1}\n")
    assert call(monkeypatch, "config", "check", str(cluster_file)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["routing.fallback", "engine.threads"]
    assert all(line.startswith(f"farfill: {cluster_file}:") for line in lines)


def test_show_fills_in_defaults_and_keeps_references(monkeypatch, capsys, cluster_file: Path):
    assert call(monkeypatch, "config", "show", str(cluster_file)) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["kv_transfer"]["chunk_size_mb"] == 32
    assert shown["tickets"]["signing_key"] == "file:pki/ticket.key"
    cluster_file.write_text(yaml.safe_dump(shown))
    assert call(monkeypatch, "config", "check", str(cluster_file), "--no-files") == 0


@pytest.mark.parametrize(
    ("role", "options", "complaint"),
    [
        ("decode", ["--name", "nobody"], "no worker is named nobody; known: decode-near, prefill-far"),
        ("decode", ["--name", "prefill-far"], "prefill-far has role prefill, not decode"),
        ("prefill", [], "is not a folder"),
        ("registry", [], "registry.pem: cannot be read"),
        ("gateway", [], "gateway.pem: cannot be read"),
    ],
)
def test_role_that_cannot_start_says_why(monkeypatch, capfd, cluster_file: Path, role, options, complaint):
    assert call(monkeypatch, role, "--config", str(cluster_file), *options) == 2
    assert complaint in capfd.readouterr().err


def test_several_workers_need_a_name(monkeypatch, capsys, cluster_file: Path):
    extra = "  prefill-east: {role: prefill, site: east, listen: '127.0.0.1:7700'}\ntls:"
    cluster_file.write_text(cluster_file.read_text().replace("tls:", extra))
    assert call(monkeypatch, "prefill", "--config", str(cluster_file)) == 2
    assert "say --name with one of: prefill-far, prefill-east" in capsys.readouterr().err


def test_wrong_call_exits_2(monkeypatch, capsys):
    assert call(monkeypatch, "model", "fetch", "gpt-9") == 2
    assert "no model 'gpt-9'; known: smollm2, gemma3" in capsys.readouterr().err
    assert call(monkeypatch, "nonsense") == 2


def test_version_is_printed(monkeypatch, capsys):
    assert call(monkeypatch, "version") == 0
    assert capsys.readouterr().out.startswith("farfill ")
