"""The process's memory and threads, as far as torch on a CPU needs them set."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from functools import cache

import torch

from farfill.core.errors import ConfigError


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


def usable_cpus(listed: str | None) -> frozenset[int]:
    """The CPUs of a list such as "0,2,8-11"; none when there is no list. Raises ConfigError for any not to be had."""
    if listed is None:
        return frozenset()
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("engine.cpus: threads cannot be pinned on this system; leave it out")
    cpus: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    missing = cpus - os.sched_getaffinity(0)
    if missing or not cpus:
        wrong = ", ".join(map(str, sorted(missing))) or f"an empty range in {listed}"
        have = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"engine.cpus: {wrong} is not among the CPUs this process may use ({have})")
    return frozenset(cpus)


def pin_thread(cpus: frozenset[int]) -> None:
    """Let the calling thread, and the threads torch starts from it, run on `cpus` only (see `usable_cpus`)."""
    if cpus:
        os.sched_setaffinity(0, cpus)
