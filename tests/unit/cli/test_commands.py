"""Commands as a person calls them: what they print, and their exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from farfill.cli.main import main
from farfill.cli.pki import create_pki, members_of
from farfill.config.load import load_config

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


@pytest.mark.parametrize(
    "arguments",
    [
        ["rollout", "set", "abc%"],
        ["rollout", "set", "101%"],
        ["rollout", "set", "nan%"],
        ["rollout", "set", "10%", "--sticky", "foo"],
        ["rollout", "set", "10%", "--reason", "r" * 501],
        ["rollout", "worker", "set", "v", "abc%", "--role", "decode"],
        ["keys", "create", "--scope", "root"],
        ["keys", "create", "--expires", "0d"],
        ["keys", "rotate", "short"],
        ["replay", "no-such-file"],
        ["replay", str(Path(__file__))],
    ],
    ids=" ".join,
)
def test_every_wrong_call_exits_2_in_one_line(monkeypatch, capsys, cluster_file: Path, arguments: list[str]):
    config = [] if arguments[0] == "replay" else ["--config", str(cluster_file)]
    assert call(monkeypatch, *arguments, *config) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("farfill: ")


def test_configuration_of_another_cluster_is_not_applied(monkeypatch, capsys, cluster_file: Path, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text("cluster: other\n" + cluster_file.read_text())
    assert call(monkeypatch, "config", "apply", str(other), "--config", str(cluster_file)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"farfill: {other}: cluster is 'other', but this cluster is 'farfill'")


def test_version_is_printed(monkeypatch, capsys):
    assert call(monkeypatch, "version") == 0
    assert capsys.readouterr().out.startswith("farfill ")


@pytest.mark.parametrize("url", ["notaurl", "ftp://x", "http://", "http://host:99999", "http://[::1", ""])
def test_parity_refuses_what_is_no_url_in_one_line(monkeypatch, capsys, url: str):
    assert call(monkeypatch, "parity", "--gateway", url) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"farfill: --gateway takes a URL such as http://127.0.0.1:8000, not {url!r}"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--up", "--gateway", "http://127.0.0.1:1"], ["--up", "--gateway"]),
        (["--up", "--config", "c.yaml"], ["--up", "--config"]),
        (["--gateway", "http://127.0.0.1:1", "--config", "c.yaml"], ["--gateway", "--config"]),
        (["--dtype", "float32", "--accept-gemma-terms"], ["--dtype", "--accept-gemma-terms", "without --up"]),
    ],
)
def test_parity_refuses_options_that_contradict_each_other(monkeypatch, capsys, options, named):
    assert call(monkeypatch, "parity", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in named)


def test_up_refuses_a_folder_for_logs_that_cannot_be_made(monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "file").touch()
    assert call(monkeypatch, "up", "--keep-logs", str(tmp_path / "file" / "logs")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot keep logs in" in line
    assert "Not a directory" in line


def test_check_says_what_it_did_not_look_at(monkeypatch, capsys, cluster_file: Path):
    assert call(monkeypatch, "config", "check", str(cluster_file), "--no-files") == 0
    assert "Secrets and certificates were not looked at" in capsys.readouterr().out


def test_example_suits_the_cpu_it_names():
    values = yaml.safe_load(EXAMPLE.read_text())
    assert values["engine"]["device"] == "cpu"
    assert values["prefill"]["chunked_prefill_tokens"] == 512
    assert values["kv_transfer"]["timeout_ms"] == 15_000


@pytest.mark.parametrize(("days", "told"), [("1", "valid for 1 day\n"), ("2", "valid for 2 days\n")])
def test_pki_init_says_how_long_in_words_that_fit(monkeypatch, capsys, cluster_file: Path, days: str, told: str):
    assert call(monkeypatch, "pki", "init", "--config", str(cluster_file), "--days", days) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(("option", "file"), [("--baseline", "link.json"), ("--plot", "link.png")])
def test_link_measure_refuses_a_path_it_cannot_write_before_it_measures(
    monkeypatch, capsys, cluster_file: Path, tmp_path: Path, option: str, file: str
):
    path = tmp_path / "missing" / file
    assert call(monkeypatch, "link", "measure", "--config", str(cluster_file), option, str(path)) == 2
    assert f"{path}: cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "member"),
    [
        (["registry"], "registry"),
        (["link", "measure"], "prefill-far"),
        (["link", "serve"], "decode-near"),
    ],
)
def test_who_shows_a_certificate_that_peers_refuse_does_not_start(
    monkeypatch, capsys, cluster_file: Path, command: list[str], member: str
):
    pki = cluster_file.parent / "pki"
    create_pki(pki, members_of(load_config(cluster_file).config), days=1)
    for kind in ("pem", "key"):
        (pki / f"{member}.{kind}").write_bytes((pki / f"gateway.{kind}").read_bytes())
    assert call(monkeypatch, *command, "--config", str(cluster_file)) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"tls.cert file:pki/{member}.pem" in said
    assert "farfill://" in said
