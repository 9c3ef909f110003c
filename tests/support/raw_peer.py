"""A hostile or broken peer: speaks TLS with any certificate and sends whatever bytes a test wants."""

from __future__ import annotations

import socket
import ssl
from types import TracebackType

from farfill.transport.tcp import split_address
from farfill.wire.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameType,
    HelloPayload,
    Payload,
    ReasonPayload,
    decode_payload,
    encode_frame,
    unpack_header,
)


class RawPeer:
    """A blocking client. Every read has a deadline; the end of the stream raises EOFError."""

    def __init__(self, address: str, context: ssl.SSLContext | None) -> None:
        sock = socket.create_connection(split_address(address), timeout=5)
        try:
            self._sock = context.wrap_socket(sock) if context else sock
        except BaseException:
            sock.close()
            raise

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sock.close()

    def send_bytes(self, data: bytes) -> None:
        self._sock.sendall(data)

    def send(self, header: FrameHeader, payload: Payload | None = None) -> None:
        self.send_bytes(encode_frame(header, payload))

    def receive(self) -> tuple[FrameHeader, bytes]:
        header = unpack_header(self._exactly(HEADER_BYTES))
        return header, self._exactly(header.wire_bytes)

    def receive_type(self, kind: FrameType) -> tuple[FrameHeader, bytes]:
        """The next frame of that type; PINGs and CREDITs before it are skipped."""
        while True:
            header, payload = self.receive()
            if header.type is kind or header.type not in (FrameType.PING, FrameType.CREDIT):
                assert header.type is kind, (header, payload)
                return header, payload

    def receive_reason(self, kind: FrameType) -> ReasonPayload:
        return decode_payload(ReasonPayload, self.receive_type(kind)[1])

    def hello(self, instance: str, fingerprint: str, *, protocol_version: int = 1, generation: str = "g1") -> None:
        self.send(FrameHeader(FrameType.HELLO), HelloPayload(protocol_version, fingerprint, instance, generation))

    def ended(self) -> bool:
        """Whether the other side ends the stream (a reset counts)."""
        try:
            while self._sock.recv(4096):
                pass
        except ConnectionError:
            return True
        return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._sock.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data
