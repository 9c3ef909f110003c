"""`farfill up` as a user runs it: it serves, and Ctrl-C leaves no process, port or file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from farfill.cli.local_ports import free_ports, port_is_free

UP_DEADLINE_S = 180.0
STOP_DEADLINE_S = 30.0


@pytest.fixture
def up(smollm2_folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    """(process, file with its output, API port) of a started `farfill up` that is still starting its cluster."""
    del smollm2_folder  # fetched, so that nothing is downloaded here
    (port,) = free_ports(1)
    with _started(["up", "--port", str(port)], tmp_path) as (process, output):
        yield process, output, port


@contextlib.contextmanager
def _started(arguments: list[str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A `farfill` command whose temporary files lie in `tmp_path/scratch`, and the file with its output."""
    output = tmp_path / "output.txt"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "farfill.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch), "COLUMNS": "200"},
            start_new_session=True,
        )
    try:
        yield process, output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_up_serves_both_prompts_and_ctrl_c_leaves_nothing(
    up: tuple[subprocess.Popen[bytes], Path, int], tmp_path: Path
) -> None:
    process, output, port = up
    _wait_for(process, output, "Ctrl-C stops everything")
    told = output.read_text()
    assert told.count("· as placed") == 2
    assert "at site far by prefill-far" in told
    assert "at site near by decode-near" in told
    assert "hidden behind prefill" in told
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in told
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4
    (folder,) = (tmp_path / "scratch").glob("farfill-up-*")
    ports = _ports(folder / "cluster.yaml")
    assert len(ports) == 5
    assert not any(port_is_free(each) for each in ports)
    process.send_signal(signal.SIGINT)
    assert process.wait(STOP_DEADLINE_S) == 0, output.read_text()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert all(port_is_free(each) for each in ports)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_up_interrupted_while_starting_leaves_nothing(
    up: tuple[subprocess.Popen[bytes], Path, int], tmp_path: Path
) -> None:
    process, output, _ = up
    _wait_for(process, output, "starting")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.wait(STOP_DEADLINE_S)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("command", ["up", "parity"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_told_to_stop_while_starting_leaves_nothing(
    smollm2_folder: Path, tmp_path: Path, command: str, number: signal.Signals, code: int
) -> None:
    del smollm2_folder
    with _started([command, "--once" if command == "up" else "--up"], tmp_path) as (process, output):
        _wait_for(process, output, "starting")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 4
        assert list((tmp_path / "scratch").glob("farfill-up-*/pki/*.key"))
        process.send_signal(number)
        assert process.wait(STOP_DEADLINE_S) == code, output.read_text()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert list((tmp_path / "scratch").iterdir()) == []


def _wait_for(process: subprocess.Popen[bytes], output: Path, text: str) -> None:
    end_s = time.monotonic() + UP_DEADLINE_S
    while text not in output.read_text(errors="replace"):
        assert process.poll() is None, output.read_text(errors="replace")
        assert time.monotonic() < end_s, output.read_text(errors="replace")
        time.sleep(0.1)


def _ports(cluster_file: Path) -> list[int]:
    values = yaml.safe_load(cluster_file.read_text())
    workers = values["workers"].values()
    addresses = [values["gateway"]["listen"], values["registry"]["listen"]]
    addresses += [worker[key] for worker in workers for key in ("listen", "transfer_listen") if key in worker]
    return [int(address.rpartition(":")[2]) for address in addresses]
