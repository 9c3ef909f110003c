"""`farfill up` as a newcomer meets it: what it prints works as pasted, and nothing stays behind, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from farfill.cli.local_ports import HOST, free_ports, port_is_free

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

START_DEADLINE_S = 420.0
STOP_DEADLINE_S = 30.0


class Up:
    """One running `farfill up`; its temporary files go to `folder`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.output = folder / "output.txt"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "farfill.cli.main", "up", *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "300"},
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def roles(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def run_folders(self) -> list[Path]:
        return list(self.folder.glob("farfill-up-*"))

    def wait_for(self, condition: Callable[[], bool], deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end_s, self.text()
            time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    running: list[Up] = []

    def start(*options: str) -> Up:
        running.append(Up(tmp_path, *options))
        return running[-1]

    yield start
    for up in running:
        if up.process.poll() is None:
            up.process.terminate()
            up.process.wait(STOP_DEADLINE_S)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=STOP_DEADLINE_S)
    return alive == []


def test_newcomer_sees_both_prompts_tries_what_is_printed_and_leaves_nothing(start):
    (port,) = free_ports(1)
    up = start("--port", str(port))
    up.wait_for(lambda: "Ctrl-C stops everything" in up.text(), START_DEADLINE_S)
    text = up.text()
    assert "Long prompt · as placed" in text
    assert "Short prompt · as placed" in text
    assert "hidden behind prefill" in text
    assert [oct(folder.stat().st_mode & 0o777) for folder in up.run_folders()] == ["0o700"]

    curl = next(line for line in text.splitlines() if line.startswith("curl "))
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=120, check=True)
    assert '"chat.completion"' in answer.stdout
    start_line = next(line for line in text.splitlines() if line.endswith("<<'END'"))
    snippet = text[text.index(start_line) : text.index("\nEND\n") + len("\nEND\n")]
    answer = subprocess.run(["bash", "-c", snippet], capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout.strip()

    roles = up.roles()
    assert len(roles) == 4
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(STOP_DEADLINE_S) == 0, up.text()
    assert gone(roles)
    assert port_is_free(port)
    assert up.run_folders() == []


def test_roles_end_when_their_parent_is_killed(start):
    up = start("--port", str(free_ports(1)[0]))
    up.wait_for(lambda: len(up.roles()) == 4, START_DEADLINE_S)
    roles = up.roles()
    up.process.kill()
    up.process.wait(STOP_DEADLINE_S)
    assert gone(roles)


def test_role_that_dies_is_shown_and_takes_the_rest_along(start):
    up = start("--port", str(free_ports(1)[0]))
    up.wait_for(lambda: len(up.roles()) == 4, START_DEADLINE_S)
    roles = up.roles()
    next(role for role in roles if "registry" in role.cmdline()).kill()
    assert up.process.wait(STOP_DEADLINE_S) == 1
    assert "registry ended by itself with exit code -9" in up.text()
    assert gone(roles)
    assert up.run_folders() == []


def test_port_that_is_taken_is_refused_when_asked_for(start):
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        up = start("--port", str(holder.getsockname()[1]))
        assert up.process.wait(STOP_DEADLINE_S) == 2
        assert "is taken; choose another with --port" in up.text()
