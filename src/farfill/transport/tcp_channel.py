"""The two kinds of channel on a TCP socket after its TLS handshake: TLS records, or sealed records.

An ssl object must not be used by two threads at once, so a connection reads and writes on one
thread at a time, without blocking.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from farfill.transport.errors import IdentityError, TransportError
from farfill.transport.protocol import PathSample
from farfill.transport.sealed import KEY_MESSAGE_BYTES, SealedReader, SealedWriter, key_of_message
from farfill.transport.tcp_path import MAX_TLS_RECORD_BYTES, WaterMarks, close_at_once, sample_path
from farfill.transport.tls import PeerIdentity

READ_BYTES = 256 * 1024  # one call receives this much at most, so that answers are sent in between


class TlsChannel:
    def __init__(self, sock: ssl.SSLSocket, peer: PeerIdentity) -> None:
        self._sock = sock
        self._marks = WaterMarks(sock)
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
            raise broken(error) from error

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
            raise broken(error) from error
        return filled

    def hold_unsent(self, nbytes: int) -> None:
        self._marks.hold_unsent(nbytes)

    def await_bytes(self, nbytes: int) -> None:
        self._marks.await_bytes(nbytes - MAX_TLS_RECORD_BYTES)

    def finish_sending(self) -> None:
        _finish_sending(self._sock)

    def path(self) -> PathSample | None:
        return sample_path(self._sock)

    def close(self, *, at_once: bool = False) -> None:
        _close(self._sock, at_once=at_once)


class SealedChannel:
    """Sealed records on the socket of a finished TLS handshake.

    TLS reads exactly its own records from the socket, and the peer's key message is the last of them.
    """

    wants_write = False

    def __init__(self, sock: ssl.SSLSocket, peer: PeerIdentity, writer: SealedWriter) -> None:
        self._sock = sock
        self._marks = WaterMarks(sock)
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
            raise broken(error) from error

    def flush(self) -> bool:
        try:
            return self._writer.flush()
        except OSError as error:
            raise broken(error) from error

    def recv_into(self, data: memoryview) -> int | None:
        try:
            if self._reader is None:
                return self._receive_key(data)
            return self._reader.recv_into(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except OSError as error:
            raise broken(error) from error

    def _receive_key(self, data: memoryview) -> int | None:
        while len(self._key_message) < KEY_MESSAGE_BYTES:
            part = self._sock.recv(KEY_MESSAGE_BYTES - len(self._key_message))
            if not part:
                return 0
            self._key_message += part
        self._reader = SealedReader(key_of_message(self._key_message), self._sock)
        return self._reader.recv_into(data)

    def hold_unsent(self, nbytes: int) -> None:
        self._marks.hold_unsent(nbytes)

    def await_bytes(self, nbytes: int) -> None:
        self._marks.await_bytes(nbytes - (0 if self._reader is None else self._reader.held_bytes))

    def finish_sending(self) -> None:
        _finish_sending(self._sock)

    def path(self) -> PathSample | None:
        return sample_path(self._sock)

    def close(self, *, at_once: bool = False) -> None:
        _close(self._sock, at_once=at_once)


def _close(sock: ssl.SSLSocket, *, at_once: bool) -> None:
    if at_once:
        close_at_once(sock)
    else:
        sock.close()


def _finish_sending(sock: ssl.SSLSocket) -> None:
    with contextlib.suppress(OSError):
        # SSLSocket.shutdown would drop the TLS state; only the direction of the TCP stream shall end.
        socket.socket.shutdown(sock, socket.SHUT_WR)


def broken(error: OSError) -> TransportError:
    """An error of an established connection in our words."""
    return refusal(error) if isinstance(error, ssl.SSLError) else TransportError(str(error))


def refusal(error: ssl.SSLError) -> TransportError:
    """A TLS error in our words."""
    words = (error.reason or str(error) or type(error).__name__).lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        words = error.verify_message or words
    if isinstance(error, ssl.SSLEOFError) or "unexpected eof" in words:
        return TransportError("the peer closed the connection in the TLS handshake")
    if isinstance(error, ssl.SSLZeroReturnError):
        return TransportError("the peer closed the connection")
    return IdentityError(f"tls: {words}")
