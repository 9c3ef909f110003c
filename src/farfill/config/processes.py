"""Starting child processes that do not outlive this one.

Linux ties a child to the thread that forked it, not to the process. So all children are forked by one thread that
lives as long as this process: whoever starts a child may end without ending it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from farfill.config.paths import child_environment

_PR_SET_PDEATHSIG = 1


def start_child(
    command: Sequence[str], output: BinaryIO | int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """`command` in a process group of its own, with `environment` on top of ours. SIGTERM ends it when we are gone.

    `output` is a file or subprocess.PIPE, for stdout and stderr.
    """
    return _forker.submit(_start, command, output, child_environment(environment)).result()


# Its one thread stays until the interpreter ends.
_forker = ThreadPoolExecutor(1, thread_name_prefix="farfill-fork")


def _start(command: Sequence[str], output: BinaryIO | int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
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
