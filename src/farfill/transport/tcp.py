"""The TCP transport: TLS 1.3, mutual, over non-blocking sockets; sealed records after it where both ends ask for them.

Unsent data in the kernel is kept small (`tcp_path`), so that a failure or a small transfer overtakes bulk bytes.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import time

from farfill.transport.errors import TransportError, TransportInterruptedError
from farfill.transport.handshake import Handshaker
from farfill.transport.protocol import Channel, Listener, PendingChannel
from farfill.transport.waker import Waker

BACKLOG = 256


class TlsTcpTransport:
    """Give it a server context to listen, a client context to dial.

    `sealed`: after the handshake, use sealed records (`transport.sealed`) with every peer that is set so too.
    `choose_congestion`: use BBR where the kernel allows it.
    """

    def __init__(
        self,
        *,
        server: ssl.SSLContext | None = None,
        client: ssl.SSLContext | None = None,
        sealed: bool = False,
        choose_congestion: bool = True,
    ) -> None:
        self._handshaker = Handshaker(server, client, sealed=sealed, choose_congestion=choose_congestion)

    def replace_contexts(self, *, server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None) -> None:
        """New certificates or CAs for connections to come; standing ones, and what moves on them, are left alone."""
        self._handshaker.replace(server or self._handshaker.server, client or self._handshaker.client)

    def listen(self, address: str) -> Listener:
        """Bind at once. Raises TransportError when the address cannot be bound."""
        if self._handshaker.server is None:
            raise TransportError("no server certificate: this side only dials", reason="not_a_server")
        return _TcpListener(address, self._handshaker)

    def dial(self, address: str, *, timeout_s: float, interrupt: Waker, connect_s: float | None = None) -> Channel:
        """Connect, then prove both identities. Raises TransportError (IdentityError when proof fails)."""
        if self._handshaker.client is None:
            raise TransportError("no client certificate: this side only listens", reason="not_a_client")
        now_s = time.monotonic()
        deadline_s = now_s + timeout_s
        sock = _connect(address, min(deadline_s, now_s + (connect_s or timeout_s)), interrupt)
        return self._handshaker.handshake(sock, deadline_s, interrupt, server_side=False)


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _TcpListener:
    def __init__(self, address: str, handshaker: Handshaker) -> None:
        host, port = split_address(address)
        self._handshaker = handshaker
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise TransportError(f"cannot listen on {address}: {error}", reason="bind_failed") from error
        self._sock.setblocking(False)
        self.address = join_address(*self._sock.getsockname()[:2])

    def accept(self, interrupt: Waker) -> PendingChannel | None:
        while not interrupt.stopped:
            try:
                sock, remote = self._sock.accept()
            except BlockingIOError:
                with contextlib.suppress(TransportInterruptedError):
                    interrupt.wait_for(self._sock.fileno(), select.POLLIN, float("inf"))
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise TransportError(f"cannot accept: {error}", reason="out_of_descriptors") from error
                continue  # the peer was gone before it was accepted
            return _PendingTcp(sock, join_address(*remote[:2]), self._handshaker)
        return None

    def close(self) -> None:
        self._sock.close()


class _PendingTcp:
    def __init__(self, sock: socket.socket, remote: str, handshaker: Handshaker) -> None:
        self._sock = sock
        self._handshaker = handshaker
        self.remote = remote

    def handshake(self, *, timeout_s: float, interrupt: Waker) -> Channel:
        deadline_s = time.monotonic() + timeout_s
        return self._handshaker.handshake(self._sock, deadline_s, interrupt, server_side=True)

    def close(self) -> None:
        self._sock.close()


def _connect(address: str, deadline_s: float, interrupt: Waker) -> socket.socket:
    host, port = split_address(address)
    error: OSError | None = None
    try:
        targets = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as failed:
        raise TransportError(f"cannot resolve {host!r}: {failed}", reason="unreachable") from failed
    for family, kind, proto, _, target in targets:
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(target)
            if code == errno.EINPROGRESS:
                interrupt.wait_for(sock.fileno(), select.POLLOUT, deadline_s)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return sock
            error = OSError(code, f"{address}: {errno.errorcode.get(code, code)}")
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise TransportError(f"cannot connect to {error}", reason="unreachable")
