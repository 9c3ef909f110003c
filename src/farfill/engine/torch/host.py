"""The process's memory and threads, as far as torch on a CPU needs them set."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from functools import cache

import torch


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, where there is one."""
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None).malloc_trim


def trim_memory() -> None:
    """Return the heap's free pages. glibc otherwise keeps what activations of a long prefill left behind."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def set_threads(threads: int) -> None:
    """Use `threads` CPU threads inside one step; 0 leaves torch's default, one a core."""
    if threads:
        torch.set_num_threads(threads)


def pin_thread(cpus: frozenset[int]) -> None:
    """Let the calling thread, and the threads torch starts from it, run on `cpus` only, where that can be asked for."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)
