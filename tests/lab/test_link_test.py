"""`farfill link` between two sites of the lab: what it finds out, what it refuses, and whether it sees a change."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from farfill.cli.pki import create_pki, members_of
from farfill.config.load import load_config
from farfill.testing.lab import Lab

pytestmark = pytest.mark.lab

DEADLINE_S = 120
# What waits in queues when a step begins counts in it: 20 ms on a busy machine, which is 2 % of one second.
STEADY_S = 3
FARFILL = [sys.executable, "-m", "farfill.cli.main"]
PNG = b"\x89PNG\r\n\x1a\n"


def cluster_file(folder: Path, lab: Lab, *, near_dials: bool = False) -> Path:
    near, far = lab.address("near"), lab.address("far")
    cluster: dict[str, Any] = {
        "model": {"name": "any", "path": "model"},
        "gateway": {"site": "near"},
        "registry": {"site": "near", "listen": f"{near}:7400"},
        "workers": {
            "decode-near": {
                "role": "decode",
                "site": "near",
                "listen": "0.0.0.0:7500",
                "advertise": f"{near}:7500",
                "transfer_listen": "0.0.0.0:7501",
                "transfer_advertise": f"{near}:7501",
            },
            "prefill-far": {"role": "prefill", "site": "far", "listen": f"{far}:7600"},
        },
        "tls": {"ca": "file:pki/ca.pem", "cert": "file:pki/{name}.pem", "key": "file:pki/{name}.key"},
        "tickets": {"signing_key": "file:pki/ticket.key", "public_key": "file:pki/ticket.pub"},
    }
    if near_dials:
        cluster["kv_transfer"] = {"dial": "receiver"}
        del cluster["workers"]["decode-near"]["transfer_listen"]
        del cluster["workers"]["decode-near"]["transfer_advertise"]
        cluster["workers"]["prefill-far"]["transfer_listen"] = f"{far}:7601"
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    create_pki(folder / "pki", members_of(load_config(path).config), days=1)
    return path


@contextlib.contextmanager
def serving(lab: Lab, config: Path, *options: str) -> Iterator[None]:
    process = lab.start("near", [*FARFILL, "link", "serve", "--config", str(config), *options])
    try:
        lab.wait_listening("near", 7500, deadline_s=60)
        yield
    finally:
        process.terminate()
        assert process.wait(20) == 0


def measure(lab: Lab, config: Path, *options: str, seconds: int = 1) -> subprocess.CompletedProcess[str]:
    return lab.run(
        "far",
        [*FARFILL, "link", "measure", "--config", str(config), "--seconds", str(seconds), *options],
        timeout_s=DEADLINE_S,
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_measured_link_is_as_it_was_set_and_a_change_is_seen(lab: Lab, tmp_path: Path):
    config, baseline, plot = cluster_file(tmp_path, lab), tmp_path / "link.json", tmp_path / "link.png"
    link = lab.link("near", "far")
    link.set(rate_bits_per_s=100e6, rtt_s=0.04)
    with serving(lab, config):
        done = measure(lab, config, "--baseline", str(baseline), "--plot", str(plot), seconds=STEADY_S)
        assert done.returncode == 0, done.stderr
        assert "prefill-far → decode-near" in done.stdout
        report = json.loads(baseline.read_text())
        assert (report["version"], report["source"], report["target"]) == (1, "prefill-far", "decode-near")
        assert 39 < report["rtt_ms"] < 80
        best = max(step["bits_per_s"] for step in report["steps"])
        assert 60e6 < best < 97e6
        assert set(report["codecs_source"]) == set(report["codecs_target"]) == {"lz4", "zstd"}
        assert len(report["samples"]) > 5
        assert plot.read_bytes().startswith(PNG)

        link.set(rate_bits_per_s=20e6, rtt_s=0.12)
        changed = measure(lab, config, "--compare", str(baseline), "--json")
        assert changed.returncode == 3, changed.stderr
        assert "goodput" in changed.stderr
        assert "round trip" in changed.stderr
        assert json.loads(changed.stdout)["rtt_ms"] > 119


def test_a_link_that_only_near_may_open_is_measured_too(lab: Lab, tmp_path: Path):
    config, baseline = cluster_file(tmp_path, lab, near_dials=True), tmp_path / "link.json"
    lab.link("near", "far").set(rate_bits_per_s=100e6, rtt_s=0.04)
    near = lab.start("near", [*FARFILL, "link", "serve", "--config", str(config)])
    try:
        done = measure(lab, config, "--baseline", str(baseline), seconds=STEADY_S)
    finally:
        near.terminate()
        assert near.wait(20) == 0
    assert done.returncode == 0, done.stderr
    report = json.loads(baseline.read_text())
    assert 39 < report["rtt_ms"] < 80
    assert 60e6 < max(step["bits_per_s"] for step in report["steps"]) < 97e6
    assert set(report["codecs_target"]) == {"lz4", "zstd"}


def test_a_link_nobody_serves_is_one_clear_line(lab: Lab, tmp_path: Path):
    done = measure(lab, cluster_file(tmp_path, lab))
    assert done.returncode == 1
    assert "is farfill link serve running there?" in done.stderr


def test_another_worker_than_the_one_meant_is_refused(lab: Lab, tmp_path: Path):
    config = cluster_file(tmp_path, lab)
    with serving(lab, config):
        (tmp_path / "pki/decode-other.pem").write_bytes((tmp_path / "pki/prefill-far.pem").read_bytes())
        text = config.read_text().replace("decode-near", "decode-other")
        other = tmp_path / "other.yaml"
        other.write_text(text)
        done = measure(lab, other)
    assert done.returncode == 1
    assert "where decode-other was expected" in done.stderr
