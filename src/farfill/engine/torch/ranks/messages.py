"""What rank 0 tells the others to do, and what they answer: msgpack over a socket pair, in order.

Between two layers of an interruptible prefill chunk, a rank waits for `Continue` or `Abandon`; other messages may come
first. Sequences are known by number; `freed` rides on every message. Steps and `Wait` are answered with `Done`.
"""

from __future__ import annotations

import os
import select
import socket
import time

import msgspec

_LENGTH_BYTES = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """What all of them have."""

    freed: tuple[int, ...] = ()


class Load(Message, frozen=True, tag=True):
    """Load a model."""

    folder: str
    dtype: str
    attention: str
    prefill_chunk_tokens: int


class Pack(Message, frozen=True, tag=True):
    """Pack the linear layers, after one plain pass when rank 0 needs to compare with it."""

    compares: bool


class Allocate(Message, frozen=True, tag=True):
    """A new sequence; its memory comes as a file descriptor. `copies`: it begins as a copy of that one."""

    number: int
    capacity_tokens: int
    copies: int | None = None


class Attach(Message, frozen=True, tag=True):
    number: int
    tokens: int


class Truncate(Message, frozen=True, tag=True):
    number: int
    tokens: int


class Prefill(Message, frozen=True, tag=True):
    number: int
    token_ids: tuple[int, ...]
    interruptible: bool
    chunked: bool


class Decode(Message, frozen=True, tag=True):
    """`rows`: (sequence, token)."""

    rows: tuple[tuple[int, int], ...]
    merged: bool


class Continue(Message, frozen=True, tag=True):
    """Go on with the next layer."""


class Abandon(Message, frozen=True, tag=True):
    """Give the prefill chunk up."""


class Wait(Message, frozen=True, tag=True):
    """Answer when everything before is done."""


class Done(msgspec.Struct, frozen=True, array_like=True):
    """`error`: why the step failed. `exchange_s` and `step_s` grow from the start of the process."""

    error: str | None = None
    exchange_s: float = 0.0
    step_s: float = 0.0


Order = Load | Pack | Allocate | Attach | Truncate | Prefill | Decode | Continue | Abandon | Wait

_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(Order).decode
_decode_done = msgspec.msgpack.Decoder(Done).decode


class Disconnected(Exception):  # noqa: N818 (the other side ended, for whatever reason)
    """The other process is gone."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def send(self, message: Message | Done, descriptor: int | None = None) -> None:
        """Queue a message. Raises Disconnected."""
        body = _encode(message)
        head = len(body).to_bytes(_LENGTH_BYTES, "big")
        try:
            if descriptor is None:
                self._socket.sendall(head + body)
            else:
                socket.send_fds(self._socket, [head], [descriptor])
                self._socket.sendall(body)
        except OSError as error:
            raise Disconnected(str(error)) from error

    def order(self) -> tuple[Order, int | None]:
        """The next message and the descriptor that came with it. Raises Disconnected."""
        body, descriptor = self._receive(None)
        return _decode_order(body), descriptor

    def done(self, timeout_s: float) -> Done:
        """The next answer. Raises Disconnected, or TimeoutError."""
        return _decode_done(self._receive(time.monotonic() + timeout_s)[0])

    def close(self) -> None:
        """Let the other side know that nothing comes any more."""
        self._socket.close()

    def _receive(self, until_s: float | None) -> tuple[bytes, int | None]:
        head, descriptors = b"", []
        while len(head) < _LENGTH_BYTES:
            self._bound(until_s)
            more, fds, _, _ = socket.recv_fds(self._socket, _LENGTH_BYTES - len(head), 1)
            if not more:
                raise Disconnected("the other side closed")
            head += more
            descriptors += fds
        body = bytearray(int.from_bytes(head, "big"))
        view = memoryview(body)
        while view:
            self._bound(until_s)
            count = self._socket.recv_into(view)
            if not count:
                raise Disconnected("the other side closed within a message")
            view = view[count:]
        return bytes(body), descriptors[0] if descriptors else None

    def _bound(self, until_s: float | None) -> None:
        """Wait until there is something to read; the socket itself has no timeout, since others send on it."""
        if until_s is not None and not self._readable.poll(max(0.0, until_s - time.monotonic()) * 1000):
            raise TimeoutError("no answer in time")


def channel_of(descriptor: int) -> Channel:
    """The end of a socket pair that this process was started with."""
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor))
