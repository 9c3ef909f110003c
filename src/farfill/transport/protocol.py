"""Bytes between two hosts: what a transport offers, and what runs on top of a connection.

A `Channel` is an authenticated, non-blocking byte pipe. `connection.Connection` cuts it into frames on one
thread and talks to a `Session`, which decides what to send and where payloads go. Sessions pull: the
next frame is asked for only when the channel can take it, so queues stay with whoever owns the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from farfill.core.errors import FarfillError
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import FrameHeader

UNSENT_BYTES = 512 * 1024

# Receives into a buffer without blocking: bytes received, 0 at the end of the stream, None when it would block.
Receive = Callable[[memoryview], int | None]


@dataclass(frozen=True, slots=True)
class PathSample:
    """What the kernel measured on one connection. Counters run from its beginning.

    `silent_s`: how long the other host has confirmed nothing although something is on its way; a host that is alive
    but reads slowly confirms. `delivery_bytes_per_s`: the latest rate of arrival there. `confirmed_bytes`: what it has
    confirmed. `window_bytes_per_s`: what its congestion window allows, 0 when that is not told.
    """

    rtt_s: float
    segments_sent: int
    segments_resent: int
    delivery_bytes_per_s: float
    silent_s: float
    congestion: str
    confirmed_bytes: int = 0
    window_bytes_per_s: float = 0.0


class Channel(Protocol):
    """One authenticated duplex byte pipe, used by one thread."""

    @property
    def peer(self) -> PeerIdentity: ...

    @property
    def wants_write(self) -> bool:
        """Whether receiving cannot go on until the pipe can be written."""
        ...

    def fileno(self) -> int: ...

    def send(self, data: memoryview) -> int:
        """Bytes taken; 0 when it would block, and then the same bytes must be offered again first."""
        ...

    def flush(self) -> bool:
        """Push what `send` took but kept; whether nothing is left. To be called before waiting."""
        ...

    def recv_into(self, data: memoryview) -> int | None: ...

    def hold_unsent(self, nbytes: int) -> None:
        """Take no more for sending once about so many bytes wait to leave this host; at first `UNSENT_BYTES`."""
        ...

    def await_bytes(self, nbytes: int) -> None:
        """At least so many bytes are on their way: being readable may wait until most of them are there."""
        ...

    def finish_sending(self) -> None:
        """The other side reads the end of the stream after what was sent."""
        ...

    def path(self) -> PathSample | None:
        """What is known of the path; None where there is none."""
        ...

    def close(self, *, at_once: bool = False) -> None:
        """`at_once`: what was sent but has not left this host is dropped."""
        ...


class PendingChannel(Protocol):
    """Accepted, not yet authenticated."""

    @property
    def remote(self) -> str:
        """Network address of the other side, for logs."""
        ...

    def handshake(self, *, timeout_s: float, interrupt: Waker) -> Channel:
        """Authenticate within `timeout_s`. Raises TransportError; the channel is closed then."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """Accepts connections."""

    @property
    def address(self) -> str:
        """host:port it listens on."""
        ...

    def accept(self, interrupt: Waker) -> PendingChannel | None:
        """Block until somebody connects; None once `interrupt` was woken."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """A way to reach other hosts."""

    def listen(self, address: str) -> Listener: ...

    def dial(self, address: str, *, timeout_s: float, interrupt: Waker, connect_s: float | None = None) -> Channel:
        """Connect (within `connect_s`, if given) and authenticate within `timeout_s`. Raises TransportError."""
        ...


class OutgoingFrame:
    """A header (with a small payload, if any) and a big payload that is sent without copying it."""

    __slots__ = ("_head", "_lock", "_payload", "size")

    def __init__(self, head: bytes, payload: memoryview | None = None) -> None:
        self._head = memoryview(head)
        self._payload = payload
        self._lock = Lock()
        self.size = len(head) + (0 if payload is None else len(payload))

    def send(self, position: int, slice_bytes: int, send: Callable[[memoryview], int]) -> int:
        """Send up to `slice_bytes` from `position` on; bytes taken."""
        head = len(self._head)
        if position < head:
            return send(self._head[position:])
        with self._lock:
            assert self._payload is not None
            start = position - head
            return send(self._payload[start : start + slice_bytes])

    def detach(self) -> None:
        """Copy the payload: afterwards the frame no longer reads memory that belongs to somebody else."""
        with self._lock:
            if self._payload is not None:
                self._payload = memoryview(bytes(self._payload))


class ChunkSink(Protocol):
    """Where the payload of one CHUNK goes."""

    @property
    def remaining(self) -> int:
        """Bytes still to come."""
        ...

    def fill(self, receive: Receive) -> int | None:
        """Call `receive` once with a place for the next bytes; its result."""
        ...

    def complete(self) -> None:
        """Everything is in: verify, decode, account."""
        ...

    def abandon(self) -> None:
        """The connection ended before the payload did."""
        ...


class Session(Protocol):
    """What a connection is for. Called on the connection's thread only; an exception ends the connection."""

    def next_frame(self, now_s: float) -> OutgoingFrame | None:
        """The next frame to send; None when there is none (wake the connection when there is)."""
        ...

    def frame_sent(self, frame: OutgoingFrame, now_s: float) -> None:
        """The kernel took the whole frame."""
        ...

    def control(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        """Any frame but CHUNK arrived."""
        ...

    def chunk(self, header: FrameHeader, now_s: float) -> ChunkSink | None:
        """A CHUNK begins to arrive. None: there is no place for it now, nothing is read until it is asked again.

        That happens when the connection is woken, or `tick` was due.
        """
        ...

    def tick(self, now_s: float, path: Callable[[], PathSample | None]) -> float:
        """Check deadlines; the longest wait, in seconds, until the next call. `path` asks the channel."""
        ...

    @property
    def finishing(self) -> bool:
        """Whether the connection shall end once `next_frame` has no more (it then returns control frames only)."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """How much may wait to leave this host; see `Channel.hold_unsent`."""
        ...

    def violated(self, error: FarfillError) -> None:
        """The peer broke the protocol: nothing more is read. `next_frame` may have a last word."""
        ...

    def closed(self, error: Exception | None) -> None:
        """Last call: the connection is over."""
        ...
