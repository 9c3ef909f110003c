"""Free ports on the loopback interface."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

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
    """`count` different free ports, none of which this process was given before: it may not have bound them yet."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:  # all are held until the last is found
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
            if port not in _given:
                found.append(port)
        _given.extend(found)
    return found


# The kernel has some 28 000 to give.
_given: deque[int] = deque(maxlen=4096)
