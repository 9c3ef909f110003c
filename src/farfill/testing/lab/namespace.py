"""Network namespaces without names: made, entered and given a TUN device through file descriptors.

A namespace lives as long as a descriptor or a process in it, so nothing is left to clean up, however its owner ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from farfill.testing.lab.errors import LabError

DEVICE = "wan0"
MTU_BYTES = 1500
_CLONE_NEWNET = 0x40000000
# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM, _OFFLOAD_TSO4 = 0x01, 0x02
_TUN = Path("/dev/net/tun")
_IP_DEADLINE_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(namespace_fd: int) -> Iterator[None]:
    """The calling thread, with what it starts and opens meanwhile, is in the namespace. Do not await in it."""
    home_fd = _own_namespace()
    try:
        _check(_libc.setns(namespace_fd, _CLONE_NEWNET), "enter a network namespace")
        try:
            yield
        finally:
            _check(_libc.setns(home_fd, _CLONE_NEWNET), "leave a network namespace")
    finally:
        os.close(home_fd)


def create_namespace() -> int:
    """Descriptor of a new, empty network namespace. Raises `LabError` where that is not allowed."""
    home_fd = _own_namespace()
    try:
        _check(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
        try:
            return _own_namespace()
        finally:
            _check(_libc.setns(home_fd, _CLONE_NEWNET), "leave a network namespace")
    finally:
        os.close(home_fd)


def create_tun() -> int:
    """Descriptor of a new TUN device in the current namespace, with virtio headers, checksum and TSO offload."""
    try:
        fd = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"cannot open {_TUN}: {error.strerror}") from error
    try:
        request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(fd, _TUNSETIFF, request)
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TSO4)
    except OSError as error:
        os.close(fd)
        raise LabError(f"cannot make a TUN device with offload: {error.strerror}") from error
    return fd


def ip(*arguments: str) -> str:
    """Runs iproute2's `ip` in the current namespace; its output. Raises `LabError` when it fails."""
    try:
        done = subprocess.run(
            ["ip", *arguments], capture_output=True, text=True, timeout=_IP_DEADLINE_S, check=False
        )  # fmt: skip
    except FileNotFoundError as error:
        raise LabError("the lab needs `ip`: install iproute2") from error
    if done.returncode != 0:
        raise LabError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise LabError(f"cannot {what}: {os.strerror(error)}")
