"""`farfill keys` on a file of keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from farfill.cli.keys import app
from farfill.core.errors import ConfigError, InvalidRequestError
from farfill.registry.api_keys import KeyDigests, key_id
from farfill.registry.key_file import read_key_file
from support.gateway_harness import make_config

PEPPER = "a pepper of sufficient length"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    config = make_config(tmp_path / "model", access={"keys": "file", "pepper": "file:pepper"})
    (tmp_path / "pepper").write_text(PEPPER + "\n")
    (tmp_path / "pepper").chmod(0o600)
    path = tmp_path / "cluster.yaml"
    values = json.loads(config.model_dump_json(exclude_unset=True))
    values["workers"]["d"] |= {"listen": "10.0.0.1:7500", "transfer_listen": "10.0.0.1:7501"}
    values["tls"] |= {"cert": "file:{name}.pem", "key": "file:{name}.key"}
    path.write_text(yaml.safe_dump(values))
    return path


def keys(cluster: Path, *arguments: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, [*arguments, "--config", str(cluster)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def test_key_is_made_listed_rotated_and_revoked(cluster: Path) -> None:
    made, told = keys(cluster, "create", "--tenant", "team", "--model", "tiny", "--model", "l*", "--expires", "90d")
    key = made.strip()
    wanted = key_id(key)
    assert wanted is not None
    assert f"{wanted}: api, tenant team, models tiny l*" in told
    record = read_key_file(cluster.parent / "keys.json").keys[0]
    assert KeyDigests(PEPPER.encode()).matches(key, record, 0)
    assert record.expires_unix_s == pytest.approx(record.created_unix_s + 90 * 86_400, abs=60)
    listed, _ = keys(cluster, "list")
    assert listed.startswith(f"{wanted}  api, tenant team, models tiny l*, until ")
    shown = json.loads(keys(cluster, "list", "--json")[0])
    assert shown["tenant"] == "team"
    assert not any("digest" in name for name in shown)
    again = keys(cluster, "rotate", wanted, "--overlap", "1h")[0].strip()
    record = read_key_file(cluster.parent / "keys.json").keys[0]
    for each in (key, again):
        assert KeyDigests(PEPPER.encode()).matches(each, record, record.former_until_unix_s - 1)
    assert "former secret until" in keys(cluster, "list")[0]
    assert keys(cluster, "revoke", wanted, "--reason", "left")[0] == f"{wanted}: revoked\n"
    assert keys(cluster, "list")[0] == "no keys\n"
    audit = read_key_file(cluster.parent / "keys.json").audit
    assert [line.why for line in audit] == ["", "", "left"]
    assert all("@" in line.who for line in audit)
    assert all(part not in (cluster.parent / "keys.json").read_text() for part in (key[16:], again[16:]))


@pytest.mark.parametrize("field", ["expires_unix_s", "former_until_unix_s", "created_unix_s"])
def test_key_with_a_time_beyond_the_calendar_does_not_hide_the_others(cluster: Path, field: str) -> None:
    """As an earlier version, or a hand, may have written it."""
    for _ in range(2):
        keys(cluster, "create")
    path = cluster.parent / "keys.json"
    content = json.loads(path.read_text())
    content["keys"][0][field] = 1e308
    path.write_text(json.dumps(content))
    listed = keys(cluster, "list")[0]
    assert len(listed.splitlines()) == 2
    assert "Unix time 1e+308" in listed
    keys(cluster, "revoke", content["keys"][0]["id"])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["create", "--scope", "root"], "--scope is one of"),
        (["create", "--expires", "soon"], "--expires: 'soon' is no time"),
        (["create", "--expires", "0d"], "has expired already"),
        (["create", "--expires", "0.0s"], "has expired already"),
        (["create", "--tenant", "a:b"], "is no tenant"),
        (["create", "--allow-from", "10.0.0.1/8"], "is no network"),
        (["revoke", "ff_0123456789AB_x"], "is no id"),
        (["revoke", "0123456789AB"], "there is no key"),
        (["rotate", "0123456789AB", "--overlap", "1y"], "--overlap: '1y' is no time"),
    ],
)
def test_wrong_call_says_what_is_wrong(cluster: Path, arguments: list[str], what: str) -> None:
    keys(cluster, "create")
    with pytest.raises(InvalidRequestError, match=what):
        keys(cluster, *arguments)


def test_cluster_without_keys_says_what_to_add(cluster: Path) -> None:
    values = yaml.safe_load(cluster.read_text())
    del values["access"]
    cluster.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="add access"):
        keys(cluster, "list")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--admin", "http://h:1", "--admin-key", "env:K"], "is not https://"),
        (["--admin", "https://h:1"], "needs --admin-key"),
        (["--admin", "https://h:1", "--admin-key", "env:FARFILL_TEST_NO_SUCH_KEY"], "is not set"),
    ],
)
def test_admin_api_needs_https_and_a_key(cluster: Path, options: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        keys(cluster, "list", *options)
