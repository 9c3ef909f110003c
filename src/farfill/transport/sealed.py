"""Sealed records: AES-128-GCM over up to 256 KiB at a time, instead of TLS records of 16 KiB.

The TLS 1.3 handshake stays: it proves both identities, and inside it each side sends the key of its own direction
(see ADR 0009). From then on that direction carries records: 4 bytes of length, ciphertext, 16 bytes of tag.
The nonce counts records and is not sent; the length is associated data. So a record that was changed, dropped,
repeated or moved does not open, and the connection ends there. Bytes from an unopened record never leave here.
"""

from __future__ import annotations

import os
import socket
from struct import Struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from farfill.transport.errors import TransportError

RECORD_BYTES = 256 * 1024
KEY_BYTES = 16
TAG_BYTES = 16
# 2^34 cipher blocks under one key at most, the bound TLS 1.3 keeps for AES-GCM (RFC 8446, 5.5).
RECORDS_PER_KEY = 1 << 20

_LENGTH = Struct(">I")
_NONCE = Struct(">4xQ")
_OVERHEAD = _LENGTH.size + TAG_BYTES
# Records up to this size wait for company: a frame's header leaves with its payload, in one call.
_SMALL_BYTES = 4096
# Read with the rest of a record: the next frame's header in a record of its own, and the length of the one after.
_AHEAD_BYTES = 64 + _OVERHEAD + _LENGTH.size
_KEY_MAGIC = b"farfill-seal-1\0\0"
KEY_MESSAGE_BYTES = len(_KEY_MAGIC) + KEY_BYTES


def new_key_message() -> tuple[bytes, bytes]:
    """A fresh key for sending, and the message that tells it to the other side inside TLS."""
    key = os.urandom(KEY_BYTES)
    return key, _KEY_MAGIC + key


def key_of_message(message: bytes) -> bytes:
    """The key the other side will send with. Raises TransportError."""
    if len(message) != KEY_MESSAGE_BYTES or not message.startswith(_KEY_MAGIC):
        raise TransportError("the peer sent no sealing key", reason="bad_seal", retryable=False)
    return message[len(_KEY_MAGIC) :]


class _Cipher:
    """The key of one direction and the nonce of its next record; the key moves on after RECORDS_PER_KEY."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._aead = AESGCM(key)
        self._records = 0

    def next(self) -> tuple[AESGCM, bytes]:
        if self._records == RECORDS_PER_KEY:
            self._key = HKDFExpand(SHA256(), KEY_BYTES, b"farfill-seal-1 next key").derive(self._key)
            self._aead = AESGCM(self._key)
            self._records = 0
        nonce = _NONCE.pack(self._records)
        self._records += 1
        return self._aead, nonce


class SealedWriter:
    """Seals one direction into `sock` (non-blocking)."""

    def __init__(self, key: bytes, sock: socket.socket) -> None:
        self._cipher = _Cipher(key)
        self._sock = sock
        self._out = memoryview(bytearray(2 * (RECORD_BYTES + _OVERHEAD)))
        self._start = self._end = 0

    def send(self, data: memoryview) -> int:
        """Bytes sealed and taken over; 0 while earlier ones still wait for the socket. Raises OSError."""
        # One record may wait for the socket, and small ones with it: what is sealed is committed to this connection.
        if self._end - self._start > _SMALL_BYTES and not self.flush():
            return 0
        nbytes = min(len(data), RECORD_BYTES)
        if self._end + nbytes + _OVERHEAD > len(self._out):
            waiting = self._end - self._start
            self._out[:waiting] = bytes(self._out[self._start : self._end])
            self._start, self._end = 0, waiting
        out = self._out[self._end : self._end + nbytes + _OVERHEAD]
        _LENGTH.pack_into(out, 0, nbytes)
        aead, nonce = self._cipher.next()
        aead.encrypt_into(nonce, data[:nbytes], out[: _LENGTH.size], out[_LENGTH.size :])
        self._end += len(out)
        if nbytes > _SMALL_BYTES:
            self.flush()
        return nbytes

    def flush(self) -> bool:
        """Give the socket what waits; whether it took everything. Raises OSError."""
        while self._start < self._end:
            try:
                self._start += socket.socket.send(self._sock, self._out[self._start : self._end])
            except BlockingIOError:
                return False
        self._start = self._end = 0
        return True


class SealedReader:
    """Opens the other direction."""

    def __init__(self, key: bytes, sock: socket.socket) -> None:
        self._cipher = _Cipher(key)
        self._sock = sock
        self._in = memoryview(bytearray(2 * (RECORD_BYTES + _OVERHEAD)))
        self._start = self._end = 0
        self._opened = memoryview(b"")  # plain bytes the caller had no room for

    @property
    def held_bytes(self) -> int:
        """What it received and has not handed on."""
        return self._end - self._start + len(self._opened)

    def recv_into(self, data: memoryview) -> int | None:
        """See `protocol.Channel`. Raises TransportError (bad_seal) for a record that does not open, and OSError."""
        if len(self._opened):
            return self._leftover(data)
        nbytes = self._record()
        if nbytes is None or nbytes == 0:
            return nbytes
        length = self._in[self._start : self._start + _LENGTH.size]
        self._start += _LENGTH.size
        sealed = self._in[self._start : self._start + nbytes + TAG_BYTES]
        self._start += len(sealed)
        fits = len(data) >= nbytes
        place = data[:nbytes] if fits else memoryview(bytearray(nbytes))
        aead, nonce = self._cipher.next()
        try:
            aead.decrypt_into(nonce, sealed, length, place)
        except InvalidTag:
            raise TransportError("bytes were changed on the way", reason="bad_seal") from None
        if fits:
            return nbytes
        self._opened = place
        return self._leftover(data)

    def _leftover(self, data: memoryview) -> int:
        count = min(len(data), len(self._opened))
        data[:count] = self._opened[:count]
        self._opened = self._opened[count:]
        return count

    def _record(self) -> int | None:
        """Receive until one record is whole: its plain length; 0 at the end of the stream, None when it would block."""
        while True:
            have = self._end - self._start
            wanted = _LENGTH.size
            if have >= _LENGTH.size:
                (nbytes,) = _LENGTH.unpack_from(self._in, self._start)
                if not 0 < nbytes <= RECORD_BYTES:
                    raise TransportError(f"a sealed record of {nbytes} bytes", reason="bad_seal")
                wanted = nbytes + _OVERHEAD
                if have >= wanted:
                    return nbytes
            if not have:
                self._start = self._end = 0  # the memory that is in the cache
            elif self._start + wanted + _AHEAD_BYTES > len(self._in):
                self._in[:have] = bytes(self._in[self._start : self._end])
                self._start, self._end = 0, have
            try:
                count = socket.socket.recv_into(self._sock, self._in[self._end : self._start + wanted + _AHEAD_BYTES])
            except BlockingIOError:
                return None
            if count == 0:
                if have:
                    raise TransportError("the peer closed the connection inside a record", reason="truncated")
                return 0
            self._end += count
