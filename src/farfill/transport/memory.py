"""The in-process transport: a kernel socket pair instead of a network, names instead of certificates.

For flow tests of several sites in one process: same threads, same frames, no TLS and no ports.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from threading import Lock

from farfill.transport.errors import TransportError, TransportInterruptedError
from farfill.transport.protocol import Channel, Listener, PathSample, PendingChannel
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker


class MemoryNetwork:
    """Where listeners are found by address. Each host gets its `transport` from here."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: dict[str, _MemoryListener] = {}

    def transport(self, identity: PeerIdentity) -> MemoryTransport:
        """The transport of the host that is known as `identity`."""
        return MemoryTransport(self, identity)

    def _find(self, address: str) -> _MemoryListener | None:
        with self._lock:
            return self._listeners.get(address)

    def _add(self, address: str, listener: _MemoryListener) -> None:
        with self._lock:
            if address in self._listeners:
                raise TransportError(f"{address} is taken", reason="bind_failed")
            self._listeners[address] = listener

    def _remove(self, address: str) -> None:
        with self._lock:
            self._listeners.pop(address, None)


class MemoryTransport:
    """One host's view of the network."""

    def __init__(self, network: MemoryNetwork, identity: PeerIdentity) -> None:
        self._network = network
        self._identity = identity

    def listen(self, address: str) -> Listener:
        listener = _MemoryListener(self._network, address, self._identity)
        self._network._add(address, listener)
        return listener

    def dial(self, address: str, *, timeout_s: float, interrupt: Waker, connect_s: float | None = None) -> Channel:
        listener = self._network._find(address)
        if listener is None:
            raise TransportError(f"nobody listens on {address}", reason="unreachable")
        near, far = socket.socketpair()
        listener.push(_PendingMemory(far, self._identity))
        return _MemoryChannel(near, listener.identity)


class _MemoryListener:
    def __init__(self, network: MemoryNetwork, address: str, identity: PeerIdentity) -> None:
        self._network = network
        self._waiting: deque[_PendingMemory] = deque()
        self._arrived = Waker()
        self.address = address
        self.identity = identity

    def push(self, pending: _PendingMemory) -> None:
        self._waiting.append(pending)
        self._arrived.wake()

    def accept(self, interrupt: Waker) -> PendingChannel | None:
        while not interrupt.stopped:
            self._arrived.clear()
            if self._waiting:
                return self._waiting.popleft()
            with contextlib.suppress(TransportInterruptedError):
                interrupt.wait_for(self._arrived.fileno(), select.POLLIN, float("inf"))
        return None

    def close(self) -> None:
        self._network._remove(self.address)
        while self._waiting:
            self._waiting.popleft().close()
        self._arrived.close()


class _PendingMemory:
    def __init__(self, sock: socket.socket, peer: PeerIdentity) -> None:
        self._sock = sock
        self._peer = peer
        self.remote = f"memory:{peer.name}"

    def handshake(self, *, timeout_s: float, interrupt: Waker) -> Channel:
        return _MemoryChannel(self._sock, self._peer)

    def close(self) -> None:
        self._sock.close()


class _MemoryChannel:
    wants_write = False

    def __init__(self, sock: socket.socket, peer: PeerIdentity) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.peer = peer

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransportError(str(error)) from error

    def flush(self) -> bool:
        return True

    def recv_into(self, data: memoryview) -> int | None:
        try:
            return self._sock.recv_into(data)
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransportError(str(error)) from error

    def hold_unsent(self, nbytes: int) -> None:
        """The pair's buffer is small."""

    def await_bytes(self, nbytes: int) -> None:
        """Every wake-up is cheap here."""

    def finish_sending(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def path(self) -> PathSample | None:
        return None

    def close(self, *, at_once: bool = False) -> None:
        self._sock.close()
