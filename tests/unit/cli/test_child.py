"""Child processes outlive the thread that started them, and not the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from farfill.cli.child import Child
from farfill.config.processes import start_child

DEADLINE_S = 20.0
_PARENT = """
import os, sys
from pathlib import Path
from farfill.cli.child import Child
sys.executable = sys.argv[1]
child = Child("sleeper", [], Path(sys.argv[2]), {})
print(child.pid, flush=True)
os._exit(0)
"""


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    """Stands for the interpreter: ignores what it is told to run, and stays."""
    script = tmp_path / "sleeper"
    script.write_text("#!/bin/sh\necho started\nexec sleep 600\n")
    script.chmod(0o700)
    return script


def test_child_outlives_the_thread_that_started_it(
    sleeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(sleeper))
    children: list[Child] = []
    starter = threading.Thread(target=lambda: children.append(Child("sleeper", [], tmp_path / "log", {})))
    starter.start()
    starter.join()
    (child,) = children
    try:
        assert not child.wait(0.3), "it went with the thread"
        assert child.tail() in ([], ["started"])
    finally:
        child.signal(signal.SIGKILL)
        assert child.wait(DEADLINE_S)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a child with its parent")
def test_child_goes_with_the_process_that_started_it(sleeper: Path, tmp_path: Path) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", _PARENT, str(sleeper), str(tmp_path / "log")], capture_output=True, text=True, check=True
    )
    pid = int(parent.stdout)
    end_s = time.monotonic() + DEADLINE_S
    try:
        while _runs(pid):
            assert time.monotonic() < end_s, "it outlives its parent"
            time.sleep(0.01)
    finally:
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether that process is more than a zombie nobody has collected yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_command_that_is_not_there_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        start_child([str(tmp_path / "no-such-command")], subprocess.PIPE, {})


def test_a_child_is_its_command_and_nothing_around_it(tmp_path: Path) -> None:
    child = start_child(["sh", "-c", "echo $$ $1", "sh", "a b"], subprocess.PIPE, {})
    assert child.stdout is not None
    assert child.stdout.read().split(b" ", 1) == [b"%d" % child.pid, b"a b\n"]
    assert child.wait(DEADLINE_S) == 0
    child.stdout.close()
