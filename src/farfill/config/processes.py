"""Starting child processes that do not outlive this one.

Linux ties a child to the thread that forked it, not to the process. So all children are forked by one thread that
lives as long as this process: whoever starts a child may end without ending it.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from farfill.config.paths import child_environment

_PR_SET_PDEATHSIG = 1
_PYTHON = sys.executable


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
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return subprocess.Popen(
        [*_dying_with_parent(), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


# Nothing of ours runs between fork and exec: with the threads of torch, OpenMP or gRPC about, that can crash.
_DIE_WITH_PARENT = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() != int(sys.argv[1]):  # it died in between
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def _dying_with_parent() -> list[str]:
    """What becomes the command in the same process, which the kernel then ends with us; only Linux can."""
    if not sys.platform.startswith("linux"):
        return []
    return [_PYTHON, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
