"""Two models, keys and the admin API as real processes: who may use what, who is refused, and that logs stay clean."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.system.cluster import START_DEADLINE_S, Cluster, local_plan
from tests.system.models import write_full_attention, write_hybrid

from farfill.cli.local_ports import HOST, free_ports
from farfill.config.secrets import read_tls
from farfill.transport.tls import client_context

DEADLINE_S = 30.0
LONG = "The quick brown fox jumps over the lazy dog. " * 12


class Guarded:
    """A cluster that nobody may use without a key, and its operator."""

    def __init__(self, cluster: Cluster, admin: str) -> None:
        self.cluster, self.admin = cluster, f"https://{admin}"
        tls = read_tls(cluster.loaded, "gateway")
        self._context = client_context(tls.cert_pem, tls.key_pem, tls.ca_pem)
        self.keys: list[str] = []

    def farfill(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "farfill.cli.main", *arguments, "--config", str(self.cluster.config_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    def new_key(self, *arguments: str) -> str:
        self.keys.append(self.farfill("keys", "create", *arguments).strip())
        return self.keys[-1]

    def call(self, url: str, *, key: str | None = None, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        context: ssl.SSLContext | None = self._context if url.startswith("https") else None
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                self.headers = dict(answer.headers)
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def complete(self, key: str, model: str, prompt: str = LONG) -> tuple[int, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return self.call(f"{self.cluster.url}/v1/completions", key=key, body=body)


def until(holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come to be in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    admin, listen, transfer, far = (f"{HOST}:{port}" for port in free_ports(4))
    hybrid = {
        "name": "hybrid",
        "path": str(write_hybrid(folder / "hybrid")),
        "dtype": "float32",
        "aliases": ["default"],
    }
    (folder / "pepper").write_text("0123456789abcdef0123456789abcdef")
    (folder / "pepper").chmod(0o600)
    overrides = {
        "models": {"second": hybrid},
        "workers": {
            "decode-second": {
                "role": "decode", "site": "near", "listen": listen, "transfer_listen": transfer, "model": "second",
            },
            "prefill-second": {"role": "prefill", "site": "far", "listen": far, "model": "second"},
        },
        "access": {"pepper": "file:pepper"},
        "admin": {"listen": admin},
    }  # fmt: skip
    plan = local_plan(write_full_attention(folder / "model"), "full", dtype="float32", overrides=overrides)
    cluster = Cluster(plan, folder)
    try:
        for name in ("registry", "gateway", *cluster.loaded.config.workers):
            cluster.spawn(name)
        made = Guarded(cluster, admin)

        def ready() -> bool:
            try:
                instances = made.call(f"{made.admin}/v1/farfill/instances")[1]["instances"]
            except (OSError, urllib.error.URLError):
                return False
            return sum(instance["state"] == "ready" for instance in instances) == 4

        until(ready, START_DEADLINE_S)
        yield made
    finally:
        statuses = cluster.stop_all()
    assert set(statuses.values()) <= {0}, statuses


def test_each_model_has_its_own_pool_and_both_are_prefilled_far(guarded: Guarded) -> None:
    key = guarded.new_key("--tenant", "both")
    texts = {}
    for name, decode, prefill in (
        ("full", "decode-near", "prefill-far"),
        ("hybrid", "decode-second", "prefill-second"),
        ("default", "decode-second", "prefill-second"),
    ):
        status, answer = guarded.complete(key, name, f"{name}: {LONG}")
        assert status == 200, answer
        assert answer["model"] == {"default": "hybrid"}.get(name, name)
        assert guarded.headers["x-farfill-placement"] == "remote"
        assert guarded.headers["x-farfill-decode-instance"] == decode
        assert guarded.headers["x-farfill-prefill-instance"] == prefill
        texts[name] = answer["choices"][0]["text"]
    listed = guarded.call(f"{guarded.cluster.url}/v1/models", key=key)[1]["data"]
    assert [card["id"] for card in listed] == ["full", "hybrid"]


def test_key_sees_its_own_models_only(guarded: Guarded) -> None:
    key = guarded.new_key("--model", "full")
    assert guarded.complete(key, "full", "hi")[0] == 200
    status, answer = guarded.complete(key, "hybrid", "hi")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "hybrid" not in answer["error"]["message"].replace("'hybrid'", "", 1)


def test_changes_of_keys_reach_a_running_gateway(guarded: Guarded) -> None:
    key = guarded.new_key()
    until(lambda: guarded.complete(key, "full", "hi")[0] == 200)
    second = guarded.farfill("keys", "rotate", key[3:15], "--overlap", "1h").strip()
    guarded.keys.append(second)
    until(lambda: guarded.complete(second, "full", "hi")[0] == 200)
    assert guarded.complete(key, "full", "hi")[0] == 200, "the former one counts for an hour"
    guarded.farfill("keys", "revoke", key[3:15])
    for each in (key, second):
        until(lambda each=each: guarded.complete(each, "full", "hi")[0] == 401)


def test_admin_api_is_apart_and_has_credentials_of_its_own(guarded: Guarded) -> None:
    key = guarded.new_key()
    until(lambda: guarded.complete(key, "full", "hi")[0] == 200)
    assert guarded.call(f"{guarded.cluster.url}/v1/farfill/instances", key=key)[0] == 404
    status, made = guarded.call(f"{guarded.admin}/admin/keys", body={"scope": "monitor", "reason": "prometheus"})
    assert status == 201
    guarded.keys.append(made["key"])
    ids = [line.split()[0] for line in guarded.farfill("keys", "list").splitlines()]
    assert made["id"] in ids
    audit = guarded.call(f"{guarded.admin}/admin/audit")[1]["audit"]
    assert [line["who"] for line in audit if made["id"] in line["what"]] == ["certificate:near/gateway/gateway"]
    status, told = guarded.call(f"{guarded.admin}/admin/reload", body={})
    assert (status, told["applied"], told["needs_restart"]) == (200, [], [])


def test_no_process_ever_logged_a_key(guarded: Guarded) -> None:
    key = guarded.new_key()
    guarded.complete(key, key, key)
    until(lambda: guarded.complete(key, "full", "hi")[0] == 200)
    assert guarded.cluster.events("gateway", "admin_listening")
    for path in guarded.cluster.folder.glob("*.log"):
        text = path.read_text("utf-8", "replace")
        for each in guarded.keys:
            at = text.find(each[16:])
            assert at < 0, f"{path.name} has a key: {text[max(0, at - 200) : at]}"


def test_parity_gets_in_with_the_keys_it_is_given(guarded: Guarded, tmp_path: Path) -> None:
    for name, scope in (("client", ["--tenant", "both"]), ("operator", ["--scope", "monitor"])):
        (tmp_path / name).write_text(guarded.new_key(*scope))
        (tmp_path / name).chmod(0o600)
    base = [
        *(sys.executable, "-m", "farfill.cli.main", "parity", "--gateway", guarded.cluster.url, "--model", "default"),
        *("--lengths", "150", "--tokens", "8", "--json", "--api-key", f"file:{tmp_path / 'client'}"),
    ]
    operator = [
        *("--admin", guarded.admin, "--admin-key", f"file:{tmp_path / 'operator'}"),
        *("--admin-ca", f"file:{guarded.cluster.config_path.parent / 'pki' / 'ca.pem'}"),
    ]
    done = subprocess.run([*base, *operator], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    assert result["ok"]

    refused = subprocess.run(base[:-2], capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode == 1
    assert "API key" in refused.stderr
