"""The cluster file is refused with file, line, key and a fix for every mistake, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from farfill.config.checks import lets_in_nobody
from farfill.config.load import check_model_files, load_config
from farfill.core.cluster import Role
from farfill.core.errors import ConfigError


def complaints(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return [line.removeprefix(f"{path}:") for line in str(caught.value).splitlines()]


def changed(path: Path, old: str, new: str) -> list[str]:
    text = path.read_text()
    assert old in text
    return complaints(path, text.replace(old, new, 1))


def test_minimal_file_gives_defaults(cluster_file: Path):
    loaded = load_config(cluster_file)
    assert loaded.config.routing.remote_prefill_threshold_tokens == 4096
    assert loaded.config.workers["prefill-far"].role is Role.PREFILL
    assert loaded.model_dir == cluster_file.parent / "model"


def test_unknown_key_names_line_and_suggests(cluster_file: Path):
    assert changed(cluster_file, "  site: near\nregistry", "  sitee: near\nregistry") == [
        "4: gateway.site: required, but missing; add it, such as site: near",
        "5: gateway.sitee: unknown key; did you mean site?",
    ]


def test_unknown_key_without_neighbour_lists_known_keys(cluster_file: Path):
    (line,) = changed(cluster_file, "registry:\n", "registry:\n  zzz: 1\n")
    assert (
        line == "7: registry.zzz: unknown key; known keys here: site, listen, advertise, lease_s, store, data_dir, etcd"
    )


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("kv_transfer: {chunk_size_mb: 999}", "chunk_size_mb: 999 is out of range; give at least 1 and at most 256"),
        ("kv_transfer: {retry: '3'}", "retry: expected a whole number, found the text '3'; remove the quotes"),
        (
            "kv_transfer: {retry: 1_0}",
            "retry: expected a whole number, found the text '1_0'; give a number in plain digits",
        ),
        (
            "kv_transfer: {retry: 03}",
            "retry: expected a whole number, found the text '03'; give a number in plain digits",
        ),
        (
            "kv_transfer: {retry: 1:30}",
            "retry: expected a whole number, found the text '1:30'; give a number in plain digits",
        ),
        (
            "kv_transfer: {checksum: yes}",
            "checksum: expected true or false, found the text 'yes'; write true or false, without quotes",
        ),
        (
            "kv_transfer: {checksum: off}",
            "checksum: expected true or false, found the text 'off'; write true or false, without quotes",
        ),
        ("kv_transfer: {retry: three}", "retry: expected a whole number, found the text 'three'; give a number"),
        ("kv_transfer: {retry: 1.5}", "retry: expected a whole number, found 1.5; give a whole number"),
        (
            "kv_transfer: {checksum: 1}",
            "checksum: expected true or false, found 1; write true or false, without quotes",
        ),
        (
            "kv_transfer: {compression: zst}",
            "compression: 'zst' is not one of none, lz4, zstd or auto; did you mean zstd?",
        ),
        ("engine: {device: gpu}", "engine.device: 'gpu' is not a device; give one of: cpu, cuda, cuda:N, mps"),
        ("kv_transfer: 3", "kv_transfer: expected a group of keys, found 3; give a group of keys"),
        ("kv_transfer:", "kv_transfer: expected a group of keys, found nothing; give a value or remove the key"),
        ("routing: {circuit_breaker: {error_rate_limit: 0}}", "error_rate_limit: 0 is out of range; give more than 0"),
        ("engine: {prefix_cache_mb: 9999}", "engine.prefix_cache_mb: 9999 is more than kv_cache_mb (2048)"),
        ("routing: {circuit_breaker: {open_s: .inf}}", "open_s: .inf is not a usable number"),
        ("cluster: 5", "cluster: expected text, found 5; put it in quotes"),
        ("version: 2", "version: 2 is not one of 1; give one of these"),
        ("cluster: !!python/name:os.system ''", "cluster: the YAML tag tag:yaml.org,2002:python/name:os.system is not"),
    ],
)
def test_bad_value_is_refused_with_a_fix(cluster_file: Path, section: str, expected: str):
    text = cluster_file.read_text()
    (line,) = complaints(cluster_file, text + section + "\n")
    assert line.startswith(f"{text.count(chr(10)) + 1}: ")
    assert expected in line


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("  site: near\nregistry", "  site: naer\nregistry", "5: gateway.site: no decode worker at site 'naer', where"),
        ("role: decode", "role: decod", "10: workers.decode-near.role: 'decod' is not one of prefill, decode or mixed"),
        ("decode-near:", "Decode_Near:", "9: workers.Decode_Near: 'Decode_Near' is not a name; use up to 63"),
        ("decode-near:", "gateway:", "9: workers.gateway: gateway is the name of a role"),
        (
            "listen: 127.0.0.1:7501",
            "listen: 127.0.0.1",
            "12: workers.decode-near.listen: '127.0.0.1' is not an address",
        ),
        ("127.0.0.1:7501", "127.0.0.1:99999", "12: workers.decode-near.listen: 99999 is not a port"),
        (
            "127.0.0.1:7601",
            "127.0.0.1:7502",
            "17: workers.prefill-far.listen: same address as workers.decode-near.tran",
        ),
        (
            "127.0.0.1:7601",
            "0.0.0.0:7601",
            "17: workers.prefill-far.listen: others cannot connect to 0.0.0.0:7601; add adv",
        ),
        ("127.0.0.1:7501", "127.0.0.1:8000", "12: workers.decode-near.listen: same address as gateway.listen"),
        ("    transfer_listen: 127.0.0.1:7502\n", "", "9: workers.decode-near: a decode worker needs transfer_listen"),
        (
            "    listen: 127.0.0.1:7601\n",
            "    listen: 127.0.0.1:7601\n    transfer_listen: 127.0.0.1:7602\n",
            "18: workers.prefill-far.transfer_listen: a prefill worker dials KV connections and accepts none",
        ),
        ("ca: file:pki/ca.pem", "ca: vault:x", "19: tls.ca: vault: references are not supported yet"),
        ("ca: file:pki/ca.pem", "ca: secret", "19: tls.ca: expected a reference to a secret, never its value"),
        ("cert: file:pki/{name}.pem", "cert: file:pki/x.pem", "20: tls.cert: names one file for all roles"),
        ("cert: file:pki/{name}.pem", "cert: file:pki/{nam}.pem", "20: tls.cert: cannot fill in nam; only {name}"),
        (
            "  site: near\nregistry",
            "  site: near\n  tls_cert: file:a\nregistry",
            "6: gateway.tls_cert: tls_cert without",
        ),
        ("registry:\n", "registry:\n  store: etcd\n", "7: registry.store: etcd without its address; add etcd:"),
        (
            "registry:\n",
            "registry:\n  etcd: {endpoints: ['https://h:1']}\n",
            "7: registry.etcd: is not used by the embedded store; remove it",
        ),
        (
            "registry:\n",
            "registry:\n  store: etcd\n  etcd: {endpoints: ['https://h:1'], cert: file:x}\n",
            "registry.etcd.cert: cert without key; add key",
        ),
        (
            "registry:\n",
            "registry:\n  store: etcd\n  etcd: {endpoints: ['https://h:1'], password: file:x}\n",
            "registry.etcd.password: password without user; add user",
        ),
        (
            "registry:\n",
            "registry:\n  store: etcd\n  etcd: {endpoints: ['http://h:1'], user: u, password: file:x}\n",
            "registry.etcd.endpoints: http://h:1 would send the password in the clear; use https://",
        ),
        ("model:\n", "model:\n  name: other\n", "3: model.name: given twice (first in line 2); keep one of them"),
        ("model:\n", "model: [\n", "not valid YAML"),
    ],
)
def test_contradiction_is_refused_at_its_line(cluster_file: Path, old: str, new: str, expected: str):
    (line,) = changed(cluster_file, old, new)
    assert expected in line


@pytest.mark.parametrize("section", ["model", "gateway", "registry", "workers", "tls", "tickets"])
def test_missing_section_comes_with_an_example_that_works(cluster_file: Path, section: str):
    parts = yaml.safe_load(cluster_file.read_text())
    del parts[section]
    (line,) = complaints(cluster_file, yaml.safe_dump(parts))
    told, _, example = line.partition("; add it, such as ")
    assert told == f"1: {section}: required, but missing"
    cluster_file.write_text(yaml.safe_dump(parts) + example + "\n")
    assert section in load_config(cluster_file).config.model_dump(exclude_defaults=True)


@pytest.mark.parametrize(
    ("old", "new", "example"),
    [("name: tiny", "name: ''", "name: my-model"), ("path: model", "", "path: models/my-model")],
)
def test_missing_or_empty_value_comes_with_an_example(cluster_file: Path, old: str, new: str, example: str):
    (line,) = changed(cluster_file, old, new)
    assert line.endswith(f"such as {example}")


def test_no_workers_at_all_is_refused_with_an_example(cluster_file: Path):
    parts = {**yaml.safe_load(cluster_file.read_text()), "workers": {}}
    (line,) = complaints(cluster_file, yaml.safe_dump(parts))
    assert "workers: is empty; fill it in, such as workers: {decode-near: {role: decode" in line


def test_all_problems_come_at_once_in_line_order(cluster_file: Path):
    text = cluster_file.read_text().replace("role: prefill", "role: x").replace("name: tiny", "nam: tiny")
    lines = complaints(cluster_file, text + "loging: {}\n")
    assert [line.split(":")[0] for line in lines] == ["1", "2", "15", "25"]


def test_no_decode_worker_is_refused(cluster_file: Path):
    text = (
        cluster_file.read_text()
        .replace("role: decode", "role: prefill")
        .replace("    transfer_listen: 127.0.0.1:7502\n", "")
    )
    assert complaints(cluster_file, text) == ["8: workers: no worker decodes; add one with role decode or mixed"]


def test_same_port_on_two_hosts_is_no_clash(cluster_file: Path):
    text = cluster_file.read_text()
    text = text.replace("listen: 127.0.0.1:7601", "listen: 0.0.0.0:7501\n    advertise: 10.0.0.9:7501")
    cluster_file.write_text(text)
    assert load_config(cluster_file).config.workers["prefill-far"].advertise == "10.0.0.9:7501"


def test_merge_keys_and_aliases_are_understood(cluster_file: Path):
    text = (
        cluster_file.read_text()
        .replace("prefill-far:", "prefill-far: &far")
        .replace("tls:\n", "  prefill-east:\n    <<: *far\n    listen: 127.0.0.1:7602\ntls:\n")
    )
    cluster_file.write_text(text)
    assert load_config(cluster_file).config.workers["prefill-east"].site == "far"


def test_recursive_alias_is_refused(cluster_file: Path):
    lines = complaints(cluster_file, cluster_file.read_text() + "logging: &x {level: *x}\n")
    assert "an alias that contains itself" in lines[0]


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n"])
def test_other_yaml_is_no_cluster_file(cluster_file: Path, text: str):
    assert complaints(cluster_file, text) == ["1: not a cluster file; see examples/two-sites.yaml"]


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_model_folder_is_checked_separately(cluster_file: Path):
    loaded = load_config(cluster_file)
    with pytest.raises(ConfigError, match=r":3: model\.path: .*model is not a folder; run `farfill model fetch`"):
        check_model_files(loaded)
    loaded.model_dir.mkdir()
    (loaded.model_dir / "config.json").touch()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, \*\.safetensors"):
        check_model_files(loaded)
    (loaded.model_dir / "tokenizer.json").touch()
    (loaded.model_dir / "model.safetensors").touch()
    check_model_files(loaded)


def test_side_that_does_not_dial_needs_an_address_for_kv(cluster_file: Path):
    text = cluster_file.read_text() + "kv_transfer: {dial: receiver}\n"
    assert [line.split(": ", 1)[1] for line in complaints(cluster_file, text)] == [
        "workers.decode-near.transfer_listen: a decode worker dials KV connections and accepts none"
        " (kv_transfer.dial: receiver); remove it",
        "workers.prefill-far: a prefill worker needs transfer_listen, the address for KV connections;"
        " add transfer_listen: host:port",
    ]
    swapped = text.replace("    transfer_listen: 127.0.0.1:7502\n", "").replace(
        "    listen: 127.0.0.1:7601\n", "    listen: 127.0.0.1:7601\n    transfer_listen: 127.0.0.1:7602\n"
    )
    cluster_file.write_text(swapped)
    assert load_config(cluster_file).config.workers["prefill-far"].transfer_listen == "127.0.0.1:7602"


def test_words_and_times_that_yaml_1_1_would_change_stay_text(cluster_file: Path):
    text = cluster_file.read_text()
    assert "name: " in text
    for word in ("on", "no", "12:30:45", "010", "1_000", "0x1F", "2026-01-01"):
        lines = [f"  name: {word}" if line.startswith("  name: ") else line for line in text.splitlines()]
        cluster_file.write_text("\n".join(lines))
        assert load_config(cluster_file).config.model.name == word


@pytest.mark.parametrize(("written", "seconds"), [("1e1", 10.0), ("5", 5.0), ("+.5", 0.5), ("12.", 12.0)])
def test_numbers_in_every_plain_form(cluster_file: Path, written: str, seconds: float):
    text = cluster_file.read_text()
    cluster_file.write_text(text.replace("tickets:\n", f"tickets:\n  clock_tolerance_s: {written}\n", 1))
    assert load_config(cluster_file).config.tickets.clock_tolerance_s == seconds


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("connections: 97", "connections: 97 does not fit; give a whole number, at least 1 and at most 96, or auto"),
        ("connections: 'x'", "connections: 'x' does not fit; give a whole number, at least 1 and at most 96, or auto"),
        ("allowed_peers: a/b/c", "allowed_peers: expected a list, found the text 'a/b/c'; write [\"a/b/c\"]"),
        (
            "allowed_peers: [far/prefill/*, far/prefil/*]",
            "allowed_peers.1: 'far/prefil/*' fits no worker of this file; write site/role/name with * as a wildcard, "
            "such as near/decode/decode-near",
        ),
        (
            "chunk_size_mb: 128\n  receive_budget_mb: 64",
            "chunk_size_mb: 128 is more than receive_budget_mb (64); give at most 64, or raise receive_budget_mb",
        ),
    ],
)
def test_transfer_settings_that_cannot_work_are_one_complaint_with_a_fix(
    cluster_file: Path, values: str, expected: str
):
    (line,) = complaints(cluster_file, cluster_file.read_text() + f"kv_transfer:\n  {values}\n")
    assert line.split(" kv_transfer.", 1)[1] == expected


@pytest.mark.parametrize(
    ("allowed", "shut_out"),
    [("near/*", {"decode-near"}), ("far/prefill/*", {"prefill-far"}), ("*", set()), ("*/decode/*", {"decode-near"})],
)
def test_a_worker_that_lets_nobody_in_is_found(cluster_file: Path, allowed: str, shut_out: set[str]):
    cluster_file.write_text(cluster_file.read_text() + f"kv_transfer: {{allowed_peers: ['{allowed}']}}\n")
    config = load_config(cluster_file).config
    assert {name for name in config.workers if lets_in_nobody(config, name)} == shut_out
