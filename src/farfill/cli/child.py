"""A role as a child process: own process group, output in a file, gone when its parent is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from farfill.config.processes import start_child

_TAIL_LINES = 15


class Child:
    """One running `farfill` command."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_file: Path,
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self.log_file = log_file
        command = [python, "-m", "farfill.cli.main", *arguments]
        with log_file.open("wb") as output:
            self._process = start_child(command, output, environment)

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
