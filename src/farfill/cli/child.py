"""A role as a child process: own process group, output in a file, gone when its parent is gone.

Linux ties a child to the thread that forked it, not to the process. So all children are forked by one thread that
lives as long as this process: whoever starts a child may end without ending it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from farfill.config.paths import child_environment

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 15


class Child:
    """One running `farfill` command."""

    def __init__(self, name: str, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log_file = log_file
        command = [sys.executable, "-m", "farfill.cli.main", *arguments]
        with log_file.open("wb") as output:
            self._process = _forker.submit(_start, command, output, child_environment(environment)).result()

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self) -> list[str]:
        """The last lines it wrote."""
        return self.log_file.read_text(errors="replace").splitlines()[-_TAIL_LINES:]


# Its one thread stays until the interpreter ends.
_forker = ThreadPoolExecutor(1, thread_name_prefix="farfill-fork")


def _start(command: Sequence[str], output: BinaryIO, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 - it takes no lock: one system call, then exec
    )


def _die_with_parent() -> Callable[[], None] | None:
    """What the child runs before its command so that the kernel ends it with us; only Linux can."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def arrange() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return arrange
