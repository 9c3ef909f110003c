"""Runs one connection: cuts a channel into frames, full duplex, stepped by a reactor.

Guarantees to its session: no two calls at once, and each sees what the one before did; a frame asked for is sent whole
or the connection ends; `closed` is the last call, whatever happened; a chunk sink gets either `complete` or `abandon`.
"""

from __future__ import annotations

import select
import time

import structlog

from farfill.clock import Clock
from farfill.core.errors import FarfillError, IncompatiblePeerError, ProtocolError
from farfill.transport.errors import TransportError, TransportInterruptedError
from farfill.transport.protocol import Channel, ChunkSink, OutgoingFrame, Receive, Session
from farfill.transport.reactor import Reactor
from farfill.transport.waker import Waker
from farfill.wire.frames import HEADER_BYTES, FrameHeader, FrameType, unpack_header

# One TLS write call; a call must be repeated with the same length, so it bounds how long reading waits.
WRITE_SLICE_BYTES = 256 * 1024
MIN_SLICE_BYTES = 16 * 1024
TURN_BYTES = 1024 * 1024  # how much one direction may move before the other gets its turn
MAX_WAIT_S = 0.25
MIN_WAIT_S = 0.001
WIND_DOWN_S = 1.0

_log = structlog.get_logger(__name__)


class Connection:
    """One channel, one session."""

    def __init__(self, channel: Channel, session: Session, waker: Waker, clock: Clock) -> None:
        self.waker = waker
        self._channel = channel
        self._session = session
        self._clock = clock
        self._out: OutgoingFrame | None = None
        self._out_position = 0
        self._slice_bytes = WRITE_SLICE_BYTES
        self._write_blocked = False
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_bytes = 0
        self._sink: ChunkSink | None = None
        self._postponed: FrameHeader | None = None

    def run(self, reactor: Reactor) -> None:
        """Until either side ends it; blocks. Errors go to `session.closed`, never out of here."""
        error: Exception | None = None
        at_once = True
        try:
            reactor.run(self)
            self._wind_down()
            at_once = False
        except (ProtocolError, IncompatiblePeerError) as failed:
            error, at_once = failed, False
            self._last_words(failed)
        except (FarfillError, OSError) as failed:
            error = failed
        except Exception as failed:
            _log.exception("connection_crashed", peer=self._channel.peer.name)
            error = failed
        try:
            if self._sink is not None:
                self._sink.abandon()
            self._session.closed(error)
        finally:
            # Bytes of a broken connection must not arrive late: their chunks travel elsewhere.
            self._channel.close(at_once=at_once)

    def fileno(self) -> int:
        """See `reactor.Stepped`."""
        return self._channel.fileno()

    @property
    def wants_read(self) -> bool:
        """See `reactor.Stepped`."""
        return self._postponed is None

    @property
    def wants_write(self) -> bool:
        """See `reactor.Stepped`."""
        return self._write_blocked or self._channel.wants_write

    def step(self, *, readable: bool) -> float | None:
        """See `reactor.Stepped`."""
        self.waker.clear()
        if self.waker.stopped:
            raise TransportInterruptedError("closed from this side")
        wait_s = min(self._session.tick(self._clock.now_s(), self._channel.path), MAX_WAIT_S)
        more = self._write()
        if self._session.finishing:
            return None
        if readable or self._channel.wants_write or self._postponed is not None:
            more = self._read() or more
            self._channel.await_bytes(1 if self._sink is None else self._sink.remaining)
        return 0 if more else max(wait_s, MIN_WAIT_S)

    def _write(self) -> bool:
        """Send until the channel is full, there is nothing to send, or the turn is over: whether the last is why."""
        if not self._write_blocked:  # a call that did not get through is repeated with the same length
            unsent_bytes = self._session.unsent_bytes
            self._channel.hold_unsent(unsent_bytes)
            self._slice_bytes = min(WRITE_SLICE_BYTES, max(MIN_SLICE_BYTES, unsent_bytes))
        self._write_blocked = False
        more = self._send_frames()
        if not self._channel.flush():
            self._write_blocked = True
        return more

    def _send_frames(self) -> bool:
        moved = 0
        while moved < TURN_BYTES:
            if self._out is None:
                self._out = self._session.next_frame(self._clock.now_s())
                self._out_position = 0
                if self._out is None:
                    return False
            sent = self._out.send(self._out_position, self._slice_bytes, self._channel.send)
            if sent == 0:
                self._write_blocked = True
                return False
            moved += sent
            self._out_position += sent
            if self._out_position == self._out.size:
                frame, self._out = self._out, None
                self._session.frame_sent(frame, self._clock.now_s())
        return True

    def _read(self) -> bool:
        """Receive until the channel is empty or the turn is over: whether the last is why."""
        if self._postponed is not None:
            self._begin(self._postponed)
        moved = 0
        while moved < TURN_BYTES and self._postponed is None:
            if self._sink is None:
                count = self._channel.recv_into(self._header[self._header_bytes :])
            else:
                count = self._sink.fill(self._channel.recv_into)
            if count is None:
                return False
            if count == 0:
                self._end_of_stream()
            moved += count
            if self._sink is None:
                self._header_bytes += count
                if self._header_bytes < HEADER_BYTES:
                    continue
                self._begin(unpack_header(self._header))
            if self._sink is not None and self._sink.remaining == 0:
                sink, self._sink = self._sink, None
                sink.complete()
        return self._postponed is None

    def _begin(self, header: FrameHeader) -> None:
        self._header_bytes = 0
        if header.type is FrameType.CHUNK:
            self._sink = self._session.chunk(header, self._clock.now_s())
            self._postponed = header if self._sink is None else None
        else:
            self._sink = _ControlSink(header, self._session, self._clock)

    def _last_words(self, error: ProtocolError | IncompatiblePeerError) -> None:
        """Tell the peer what it did wrong."""
        self._session.violated(error)
        self._wind_down()

    def _end_of_stream(self) -> None:
        if self._header_bytes or self._sink is not None:
            raise TransportError("the peer closed the connection inside a frame", reason="truncated")
        raise TransportError("the peer closed the connection")

    def _wind_down(self) -> None:
        """Send what the session still has to say, end the stream, and discard what still comes.

        Closing with the peer's bytes unread would reset the connection and eat our last frame.
        """
        deadline_s = time.monotonic() + WIND_DOWN_S
        try:
            while self._write() or self._out is not None or self._write_blocked:
                if self._write_blocked:
                    self.waker.wait_for(self._channel.fileno(), select.POLLOUT, deadline_s)
            self._channel.finish_sending()
            scratch = memoryview(bytearray(64 * 1024))
            while (count := self._channel.recv_into(scratch)) != 0:
                if count is None:
                    self.waker.wait_for(self._channel.fileno(), select.POLLIN, deadline_s)
        except TransportError:
            return  # the peer is gone or silent: it had its chance to read


class _ControlSink:
    """Collects a bounded control payload and hands it to the session."""

    def __init__(self, header: FrameHeader, session: Session, clock: Clock) -> None:
        self._header = header
        self._session = session
        self._clock = clock
        self._payload = memoryview(bytearray(header.wire_bytes))
        self._filled = 0

    @property
    def remaining(self) -> int:
        return len(self._payload) - self._filled

    def fill(self, receive: Receive) -> int | None:
        count = receive(self._payload[self._filled :])
        self._filled += count or 0
        return count

    def complete(self) -> None:
        self._session.control(self._header, self._payload, self._clock.now_s())

    def abandon(self) -> None:
        """Half a control frame says nothing."""
