"""Free ports on the loopback interface."""

from __future__ import annotations

import contextlib
import socket

HOST = "127.0.0.1"


def port_is_free(port: int) -> bool:
    """Whether a server could listen at `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """`count` different free ports; all are held until the last is found."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
