"""A transport whose connections pass through somebody who sees every frame and may tamper with it.

Sits between the memory transport's ends: one thread per connection and direction reads whole frames and hands each
to a `Tamper`, which says what goes on in its place.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock, Thread

from farfill.transport.memory import MemoryNetwork, MemoryTransport, _MemoryChannel, _PendingMemory
from farfill.transport.protocol import Channel, Listener
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import HEADER_BYTES, FrameHeader, FrameType, unpack_header

OUT = "out"  # from the side that dialled
BACK = "back"


@dataclass(frozen=True, slots=True)
class SeenFrame:
    """A frame on its way. `number` counts all frames of its direction, over all connections."""

    direction: str
    number: int
    header: FrameHeader
    data: bytes

    @property
    def type(self) -> FrameType:
        return self.header.type


class CutError(Exception):
    """Raised by a tamper: this connection ends here, without a word to either side."""


# What to pass on instead of the frame: itself, nothing, several, other bytes. A generator may yield, then cut.
Tamper = Callable[[SeenFrame], Iterable[bytes]]


class FrameRelay:
    """A memory transport for one dialling host, with a tamper in the middle."""

    def __init__(self, network: MemoryNetwork, identity: PeerIdentity, tamper: Tamper) -> None:
        self._network = network
        self._identity = identity
        self._inner = MemoryTransport(network, identity)
        self._tamper = tamper
        self._lock = Lock()
        self._numbers = {OUT: 0, BACK: 0}
        self._threads: list[Thread] = []
        self._sockets: list[socket.socket] = []
        self.seen: list[SeenFrame] = []

    def listen(self, address: str) -> Listener:
        return self._inner.listen(address)

    def dial(self, address: str, *, timeout_s: float, interrupt: Waker, connect_s: float | None = None) -> Channel:
        listener = self._network._find(address)
        if listener is None:
            return self._inner.dial(address, timeout_s=timeout_s, interrupt=interrupt)
        near, near_middle = socket.socketpair()
        far_middle, far = socket.socketpair()
        self._sockets += [near_middle, far_middle]
        for direction, source, target in ((OUT, near_middle, far_middle), (BACK, far_middle, near_middle)):
            thread = Thread(target=self._pump, args=(direction, source, target), name="tamper", daemon=True)
            self._threads.append(thread)
            thread.start()
        listener.push(_PendingMemory(far, self._identity))
        return _MemoryChannel(near, listener.identity)

    def close(self) -> None:
        """End all connections and threads."""
        for sock in self._sockets:
            _end(sock)
        for thread in self._threads:
            thread.join(timeout=5)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()

    def _pump(self, direction: str, source: socket.socket, target: socket.socket) -> None:
        try:
            while head := _read(source, HEADER_BYTES):
                header = unpack_header(head)
                data = head + _read(source, header.wire_bytes)
                with self._lock:
                    frame = SeenFrame(direction, self._numbers[direction], header, data)
                    self._numbers[direction] += 1
                    self.seen.append(frame)
                for part in self._tamper(frame):
                    target.sendall(part)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        except (CutError, OSError):
            _end(source)
            _end(target)


def _read(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes; b"" at the end of the stream."""
    data = bytearray()
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            return b""
        data += more
    return bytes(data)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
