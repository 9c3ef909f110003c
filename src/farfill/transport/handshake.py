"""Makes a TCP socket a channel: TLS 1.3 with both identities proved, and sealed records where both ends ask for them.

Certificates and CA can be replaced while connections stand: each handshake uses the contexts of its moment, and what
is established stays as it is.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time

from farfill.transport.errors import TransportError
from farfill.transport.protocol import Channel
from farfill.transport.sealed import SealedWriter, new_key_message
from farfill.transport.tcp_channel import SealedChannel, TlsChannel, refusal
from farfill.transport.tcp_path import tune
from farfill.transport.tls import peer_identity
from farfill.transport.waker import Waker

LINGER_S = 1.0
# Chosen by ALPN, so inside what the TLS handshake authenticates: nobody on the way can talk the ends out of it.
SEALED_PROTOCOL = "farfill-sealed-1"


class Handshaker:
    """Holds what handshakes need. `replace` may be called on any thread."""

    def __init__(
        self,
        server: ssl.SSLContext | None,
        client: ssl.SSLContext | None,
        *,
        sealed: bool = False,
        choose_congestion: bool = True,
    ) -> None:
        self._sealed = sealed
        self._choose_congestion = choose_congestion
        self.server: ssl.SSLContext | None = None
        self.client: ssl.SSLContext | None = None
        self.replace(server, client)

    def replace(self, server: ssl.SSLContext | None, client: ssl.SSLContext | None) -> None:
        """Use these from the next handshake on."""
        for context in (server, client) if self._sealed else ():
            if context is not None:
                context.set_alpn_protocols([SEALED_PROTOCOL])
        self.server, self.client = server, client

    def handshake(self, sock: socket.socket, deadline_s: float, interrupt: Waker, *, server_side: bool) -> Channel:
        """Raises TransportError, IdentityError when proof fails or the peer is not allowed; `sock` is closed then."""
        context = self.server if server_side else self.client
        assert context is not None
        tls: ssl.SSLSocket | None = None
        try:
            sock.setblocking(False)
            tune(sock, choose_congestion=self._choose_congestion)
            tls = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
            _prove(tls, deadline_s, interrupt)
            peer = peer_identity(tls)
            if tls.selected_alpn_protocol() == SEALED_PROTOCOL:
                return SealedChannel(tls, peer, _send_key(tls, interrupt, deadline_s))
            return TlsChannel(tls, peer)
        except ssl.SSLError as error:
            _linger(tls or sock, interrupt)
            raise refusal(error) from error
        except OSError as error:
            (tls or sock).close()
            raise TransportError(f"handshake: {error}") from error
        except BaseException:
            (tls or sock).close()
            raise


def _prove(tls: ssl.SSLSocket, deadline_s: float, interrupt: Waker) -> None:
    while True:
        try:
            tls.do_handshake()
            return
        except ssl.SSLWantReadError:
            interrupt.wait_for(tls.fileno(), select.POLLIN, deadline_s)
        except ssl.SSLWantWriteError:
            interrupt.wait_for(tls.fileno(), select.POLLOUT, deadline_s)


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
