"""The TCP transport: TLS 1.3, mutual, over non-blocking sockets; sealed records after it where both ends ask for them.

An ssl object must not be used by two threads at once, so a connection reads and writes on its one
thread, without blocking, and waits in `poll`. Socket buffers are left to the kernel, which tunes them to the
path; unsent data in the kernel is kept small, so that a failure or a small transfer overtakes bulk bytes.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import time

from farfill.transport.errors import IdentityError, TransportError, TransportInterruptedError
from farfill.transport.protocol import Channel, Listener, PendingChannel
from farfill.transport.sealed import KEY_MESSAGE_BYTES, SealedReader, SealedWriter, key_of_message, new_key_message
from farfill.transport.tls import PeerIdentity, peer_identity
from farfill.transport.waker import Waker

BACKLOG = 256
UNSENT_LOW_WATER_BYTES = 512 * 1024
LINGER_S = 1.0
READ_BYTES = 256 * 1024  # one call receives this much at most, so that answers are sent in between
# Chosen by ALPN, so inside what the TLS handshake authenticates: nobody on the way can talk the ends out of it.
SEALED_PROTOCOL = "farfill-sealed-1"


class TlsTcpTransport:
    """Give it a server context to listen, a client context to dial.

    `sealed`: after the handshake, use sealed records (`transport.sealed`) with every peer that is set so too.
    """

    def __init__(
        self, *, server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None, sealed: bool = False
    ) -> None:
        self._server = server
        self._client = client
        for context in (server, client) if sealed else ():
            if context is not None:
                context.set_alpn_protocols([SEALED_PROTOCOL])

    def listen(self, address: str) -> Listener:
        """Bind at once. Raises TransportError when the address cannot be bound."""
        if self._server is None:
            raise TransportError("no server certificate: this side only dials", reason="not_a_server")
        return _TcpListener(address, self._server)

    def dial(self, address: str, *, timeout_s: float, interrupt: Waker) -> Channel:
        """Connect, then prove both identities. Raises TransportError (IdentityError when proof fails)."""
        if self._client is None:
            raise TransportError("no client certificate: this side only listens", reason="not_a_client")
        deadline_s = time.monotonic() + timeout_s
        sock = _connect(address, deadline_s, interrupt)
        return _handshake(sock, self._client, deadline_s, interrupt, server_side=False)


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _TcpListener:
    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        host, port = split_address(address)
        self._context = context
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
            return _PendingTcp(sock, join_address(*remote[:2]), self._context)
        return None

    def close(self) -> None:
        self._sock.close()


class _PendingTcp:
    def __init__(self, sock: socket.socket, remote: str, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._context = context
        self.remote = remote

    def handshake(self, *, timeout_s: float, interrupt: Waker) -> Channel:
        return _handshake(self._sock, self._context, time.monotonic() + timeout_s, interrupt, server_side=True)

    def close(self) -> None:
        self._sock.close()


class _TlsChannel:
    def __init__(self, sock: ssl.SSLSocket, peer: PeerIdentity) -> None:
        self._sock = sock
        self.peer = peer
        self.wants_write = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: memoryview) -> int:
        try:
            return self._sock.send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError as error:
            raise _broken(error) from error

    def flush(self) -> bool:
        return True

    def recv_into(self, data: memoryview) -> int | None:
        """One call of OpenSSL yields one record, 16 KiB at most: it is asked until `data` is full."""
        data, filled = data[:READ_BYTES], 0
        try:
            while filled < len(data):
                count = self._sock.recv_into(data[filled:])
                if count == 0:
                    break
                filled += count
        except ssl.SSLWantReadError:
            self.wants_write = False
            return filled or None
        except ssl.SSLWantWriteError:
            self.wants_write = True
            return filled or None
        except ssl.SSLEOFError:
            return filled
        except OSError as error:
            raise _broken(error) from error
        return filled

    def finish_sending(self) -> None:
        _finish_sending(self._sock)

    def close(self) -> None:
        self._sock.close()


class _SealedChannel:
    """Sealed records on the socket of a finished TLS handshake.

    TLS reads exactly its own records from the socket, and the peer's key message is the last of them.
    """

    wants_write = False

    def __init__(self, sock: ssl.SSLSocket, peer: PeerIdentity, writer: SealedWriter) -> None:
        self._sock = sock
        self.peer = peer
        self._writer = writer
        self._reader: SealedReader | None = None
        self._key_message = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: memoryview) -> int:
        try:
            return self._writer.send(data)
        except OSError as error:
            raise _broken(error) from error

    def flush(self) -> bool:
        try:
            return self._writer.flush()
        except OSError as error:
            raise _broken(error) from error

    def recv_into(self, data: memoryview) -> int | None:
        try:
            if self._reader is None:
                return self._receive_key(data)
            return self._reader.recv_into(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            raise _broken(error) from error

    def _receive_key(self, data: memoryview) -> int | None:
        while len(self._key_message) < KEY_MESSAGE_BYTES:
            part = self._sock.recv(KEY_MESSAGE_BYTES - len(self._key_message))
            if not part:
                return 0
            self._key_message += part
        self._reader = SealedReader(key_of_message(self._key_message), self._sock)
        return self._reader.recv_into(data)

    def finish_sending(self) -> None:
        _finish_sending(self._sock)

    def close(self) -> None:
        self._sock.close()


def _finish_sending(sock: ssl.SSLSocket) -> None:
    with contextlib.suppress(OSError):
        # SSLSocket.shutdown would drop the TLS state; only the direction of the TCP stream shall end.
        socket.socket.shutdown(sock, socket.SHUT_WR)


def _broken(error: OSError) -> TransportError:
    return _refused(error) if isinstance(error, ssl.SSLError) else TransportError(str(error))


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


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (
        (getattr(socket, "TCP_NOTSENT_LOWAT", None), UNSENT_LOW_WATER_BYTES),
        (getattr(socket, "TCP_CONGESTION", None), b"bbr"),  # loss on a WAN starves the usual default
    ):
        if option is not None:
            with contextlib.suppress(OSError):  # not offered by this kernel: its default stays
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _handshake(
    sock: socket.socket, context: ssl.SSLContext, deadline_s: float, interrupt: Waker, *, server_side: bool
) -> Channel:
    tls: ssl.SSLSocket | None = None
    try:
        sock.setblocking(False)
        _tune(sock)
        tls = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                interrupt.wait_for(tls.fileno(), select.POLLIN, deadline_s)
            except ssl.SSLWantWriteError:
                interrupt.wait_for(tls.fileno(), select.POLLOUT, deadline_s)
        peer = peer_identity(tls)
        if tls.selected_alpn_protocol() == SEALED_PROTOCOL:
            return _SealedChannel(tls, peer, _send_key(tls, interrupt, deadline_s))
        return _TlsChannel(tls, peer)
    except ssl.SSLError as error:
        _linger(tls or sock, interrupt)
        raise _refused(error) from error
    except OSError as error:
        (tls or sock).close()
        raise TransportError(f"handshake: {error}") from error
    except BaseException:
        (tls or sock).close()
        raise


def _send_key(tls: ssl.SSLSocket, interrupt: Waker, deadline_s: float) -> SealedWriter:
    """Tell the peer the key of this direction as the last TLS record. Costs no round trip."""
    key, message = new_key_message()
    while True:
        try:
            tls.send(message)  # whole or not at all: it is one record
            return SealedWriter(key, tls)
        except ssl.SSLWantWriteError:
            interrupt.wait_for(tls.fileno(), select.POLLOUT, deadline_s)


def _linger(sock: socket.socket, interrupt: Waker) -> None:
    """Let the peer read our alert: closing with its bytes unread would reset the connection under it."""
    deadline_s = time.monotonic() + LINGER_S
    scratch = bytearray(16384)
    with contextlib.suppress(OSError, TransportError), sock:
        socket.socket.shutdown(sock, socket.SHUT_WR)
        while True:
            interrupt.wait_for(sock.fileno(), select.POLLIN, deadline_s)
            if not socket.socket.recv_into(sock, scratch):
                return


def _refused(error: ssl.SSLError) -> TransportError:
    words = (error.reason or str(error) or type(error).__name__).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        words = error.verify_message or words
    if isinstance(error, ssl.SSLEOFError) or "unexpected eof" in words:
        return TransportError("the peer closed the connection in the TLS handshake")
    if isinstance(error, ssl.SSLZeroReturnError):
        return TransportError("the peer closed the connection")
    return IdentityError(f"tls: {words}")
