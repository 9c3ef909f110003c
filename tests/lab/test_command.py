"""`python -m farfill.testing.lab`, as people and scripts call it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from farfill.testing.lab.__main__ import app
from farfill.testing.lab.units import bits_per_s, seconds, share, size_bytes
from lab.wan import DEADLINE_S

DOCUMENT = Path(__file__).parents[2] / "docs/lab.md"
# Prints the round trip of a TCP handshake in milliseconds.
HANDSHAKE = (
    "import socket, sys, time; t = time.monotonic(); "
    "socket.create_connection((sys.argv[1], 8000), 10).close(); print((time.monotonic() - t) * 1000)"
)


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "farfill.testing.lab", *arguments],
        capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False,
    )  # fmt: skip


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    call("down", "--name", name)


@pytest.mark.lab
def test_once_runs_a_command_over_the_link_and_passes_its_exit_code_on() -> None:
    server = f"near: {sys.executable} -m http.server 8000"
    options = ["--rtt", "40ms", "--rate", "1gbit", "--with", server, "--wait", "near:8000"]
    done = call("once", *options, "far", "--", sys.executable, "-c", HANDSHAKE, "{near}")
    assert done.returncode == 0, done.stderr
    assert 40 <= float(done.stdout) < 400
    assert call("once", "far", "sh", "-c", "exit 3").returncode == 3
    assert call("once", "far", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL


@pytest.mark.lab
def test_a_lab_stays_up_and_is_changed_and_used_from_other_processes(name: str) -> None:
    up = call("up", "--name", name, "--sites", "near,far,other", "--rtt", "20ms", "--loss", "1%")
    assert up.returncode == 0, up.stderr
    assert "10.77.0.3" in up.stdout
    assert call("set", "near", "far", "--name", name, "--rate", "10mbit", "--one-way").returncode == 0
    assert call("cut", "far", "other", "--name", name).returncode == 0
    shown = json.loads(call("show", "--name", name, "--json").stdout)
    ways = {(way["source"], way["target"]): way for way in shown["directions"]}
    assert ways["near", "far"]["rate_bits_per_s"] == 10e6
    assert ways["far", "near"]["rate_bits_per_s"] is None
    assert ways["far", "near"]["delay_s"] == 0.01
    assert ways["other", "far"]["is_cut"]
    assert call("heal", "far", "other", "--name", name).returncode == 0
    assert "  cut, " not in call("show", "--name", name).stdout
    inside = call("run", "--name", name, "other", "--", "ip", "-brief", "address", "show", "wan0")
    assert "10.77.0.3/24" in inside.stdout


@pytest.mark.lab
def test_down_ends_what_runs_there_and_frees_the_name(name: str) -> None:
    assert call("up", "--name", name).returncode == 0
    again = call("up", "--name", name)
    assert (again.returncode, again.stderr) == (1, f"lab: a lab named {name} is up already\n")
    argv = [sys.executable, "-m", "farfill.testing.lab", "run", "--name", name, "far", "sh", "-c", "echo in; sleep 600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as inhabitant:
        assert inhabitant.stdout.readline() == "in\n"
        assert call("down", "--name", name).returncode == 0
        assert inhabitant.wait(DEADLINE_S) == -signal.SIGKILL
    gone = call("show", "--name", name)
    assert (gone.returncode, gone.stderr) == (1, f"lab: no lab named {name} is up\n")


@pytest.mark.lab
def test_mistakes_are_said_in_one_line(name: str) -> None:
    assert call("up", "--name", name).returncode == 0
    assert call("run", "--name", name, "east", "true").stderr == "lab: no site east: the lab has near, far\n"
    assert "jitter of" in call("set", "near", "far", "--name", name, "--jitter", "5ms").stderr
    assert call("run", "--name", name, "far", "no-such-command").stderr.startswith("lab: [Errno 2]")
    assert call("once", "--wait", "near", "far", "true").stderr == "lab: 'near' is not SITE:PORT\n"
    assert call("once", "--sites", "one", "one", "true").stderr.startswith("lab: a lab has 2 to 8 sites")


def test_every_command_and_option_is_in_the_documentation() -> None:
    text = DOCUMENT.read_text()
    commands = [command for command in get_command(app).commands.values() if not command.hidden]
    assert len(commands) >= 8
    for command in commands:
        assert f"`{command.name}" in text
        for option in (flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")):
            assert f"`{option}" in text, f"{option} of {command.name}"


def test_quantities_are_read_with_their_units() -> None:
    assert bits_per_s("1.5gbit") == 1.5e9
    assert bits_per_s("unlimited") == float("inf")
    assert seconds("250us") == pytest.approx(0.00025)
    assert share("0.1%") == pytest.approx(0.001)
    assert size_bytes("4mb") == 4_000_000
    for parse, text in ((bits_per_s, "1"), (seconds, "30"), (share, "-1%"), (share, "0.1"), (size_bytes, "1kib")):
        with pytest.raises(ValueError, match="is not a number with one of"):
            parse(text)
