"""What the lab's tests do over a link: sockets at sites, echoes, transfers and floods. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from farfill.testing.lab import Lab

DEADLINE_S = 20.0


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        pause.wait(0.01)


@dataclass
class Connection:
    """A TCP connection from `client` to `server`, and how long its handshake took."""

    client: socket.socket
    server: socket.socket
    connect_s: float


@contextlib.contextmanager
def connection(lab: Lab, client: str, server: str) -> Iterator[Connection]:
    with contextlib.ExitStack() as stack:
        with lab.inside(server):
            listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        with lab.inside(client):
            sender = stack.enter_context(socket.socket())
        for each in (listener, sender):
            each.settimeout(DEADLINE_S)
        before = time.monotonic()
        sender.connect((lab.address(server), listener.getsockname()[1]))
        connect_s = time.monotonic() - before
        receiver = stack.enter_context(listener.accept()[0])
        receiver.settimeout(DEADLINE_S)
        yield Connection(sender, receiver, connect_s)


@dataclass
class Reading:
    """Reads a socket to its end in a thread: the digest, the size, and when bytes came."""

    received_bytes: int = 0
    digest: str = ""
    error: OSError | None = None
    _thread: threading.Thread = field(init=False)

    @classmethod
    def of(cls, source: socket.socket) -> Reading:
        reading = cls()
        reading._thread = threading.Thread(target=reading._read, args=(source,), daemon=True)
        reading._thread.start()
        return reading

    def finished(self) -> Reading:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), f"reading did not end, {self.received_bytes} bytes so far"
        assert self.error is None, self.error
        return self

    def _read(self, source: socket.socket) -> None:
        digest = hashlib.sha256()
        buffer = bytearray(1 << 18)
        try:
            while size := source.recv_into(buffer):
                digest.update(memoryview(buffer)[:size])
                self.received_bytes += size
        except OSError as error:
            self.error = error
        self.digest = digest.hexdigest()


def handled(lab: Lab, source: str, target: str) -> int:
    """Wire packets that one direction has delivered or dropped."""
    seen = lab.direction(source, target).counters()
    return seen.packets + seen.lost + seen.overflowed + seen.severed


def flood(lab: Lab, source: str, target: str, *, count: int, size: int = 100) -> int:
    """Sends UDP datagrams and waits until none is under way; how many arrived. Nothing else may use the direction."""
    with contextlib.ExitStack() as stack:
        with lab.inside(target):
            receiver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        receiver.bind((lab.address(target), 0))
        receiver.setblocking(False)
        with lab.inside(source):
            sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sender.connect(receiver.getsockname())
        before = handled(lab, source, target)
        arrived = 0
        for sent in range(1, count + 1):
            sender.send(bytes(size))
            if sent % 100 == 0 or sent == count:  # never more than the receive buffer holds
                wait_for(lambda sent=sent: handled(lab, source, target) >= before + sent, "datagrams to get through")
                arrived += _drained(receiver)
        return arrived


def _drained(receiver: socket.socket) -> int:
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            receiver.recv(65536)
            count += 1
    return count
