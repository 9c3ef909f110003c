"""Accepts connections: bounded in number, told apart from each other only by who they prove to be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock, Thread
from typing import Protocol

import structlog

from farfill.clock import Clock
from farfill.transfer.limits import Liveness
from farfill.transfer.waiting import until
from farfill.transport.connection import Connection
from farfill.transport.errors import TransportError, TransportInterruptedError
from farfill.transport.protocol import Listener, PendingChannel, Session, Transport
from farfill.transport.reactor import Reactor
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker

MAX_CONNECTIONS = 1024
# Peers that have not proved who they are may hold no more threads than this. With one more, the longest silent
# one of the address that has most of them goes: a handshake takes a few round trips, who is slower is hardly a peer.
MAX_HANDSHAKES = 128
ACCEPT_RETRY_S = 0.1
LAST_WORDS_S = 0.5
JOIN_S = 5.0

_log = structlog.get_logger(__name__)


class ServedSession(Session, Protocol):
    """What is said on a connection. `welcomed`: the other end was accepted as a peer."""

    welcomed: bool

    def finish(self) -> None:
        """End after what is queued."""
        ...


# Who connected, from which network address, and the waker of the thread that will serve it.
MakeSession = Callable[[PeerIdentity, str, Waker], ServedSession]
Refused = Callable[[str | None, str, str, str], None]


class Door:
    """Owns the listener, the accepted connections and their threads."""

    def __init__(
        self,
        listen: str,
        transport: Transport,
        make_session: MakeSession,
        refused: Refused,
        *,
        liveness: Liveness,
        clock: Clock,
        reactor: Reactor,
    ) -> None:
        """`refused` hears (certified name or None, network address, reason, detail)."""
        self.make_session = make_session
        self.refused = refused
        self.liveness = liveness
        self.clock = clock
        self.reactor = reactor
        self._listen = listen
        self._transport = transport
        self._listener: Listener | None = None
        self._waker = Waker()
        self._lock = Lock()
        self._lines: set[_Line] = set()
        # The oldest first.
        self._handshakes: dict[_Line, str] = {}
        self._thread = Thread(target=self._accept, name="farfill-kv-accept", daemon=True)

    @property
    def address(self) -> str:
        """host:port it listens on; the configured one before `start`."""
        return self._listener.address if self._listener is not None else self._listen

    def start(self) -> None:
        """Bind and accept. Raises TransportError."""
        self._listener = self._transport.listen(self._listen)
        self._thread.start()

    async def close(self) -> None:
        """Stop accepting, let connections say what is queued, end every thread. Idempotent."""
        self._waker.stop()
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.finish()
        if not await until(lambda: not self._lines, LAST_WORDS_S):
            with self._lock:
                lines = list(self._lines)
            for line in lines:
                line.waker.stop()
        await until(lambda: not any(line.thread.is_alive() for line in lines), JOIN_S)
        await until(lambda: not self._thread.is_alive(), JOIN_S)
        self._waker.close()

    def handshake_over(self, line: _Line) -> None:
        """A connection is no longer anonymous, or over."""
        with self._lock:
            self._handshakes.pop(line, None)

    def line_over(self, line: _Line) -> None:
        """A connection's thread ends."""
        with self._lock:
            self._lines.discard(line)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            while not self._waker.stopped:
                try:
                    pending = self._listener.accept(self._waker)
                except TransportError as error:
                    _log.error("transfer_accept_failed", reason=error.reason, detail=str(error))
                    self._waker.sleep(ACCEPT_RETRY_S)
                    continue
                if pending is not None:
                    self._admit(pending)
        finally:
            self._listener.close()

    def _admit(self, pending: PendingChannel) -> None:
        evicted: _Line | None = None
        with self._lock:
            if len(self._handshakes) >= MAX_HANDSHAKES:
                evicted = self._longest_silent()
                del self._handshakes[evicted]
            # Those told to go hold a thread for a moment yet.
            full = len(self._lines) >= MAX_CONNECTIONS
            admitted = not full and not self._waker.stopped
            if admitted:
                line = _Line(self, pending)
                self._lines.add(line)
                self._handshakes[line] = pending.remote.rpartition(":")[0]
                line.thread.start()
        if evicted is not None:
            evicted.waker.stop()
            self.refused(
                None, evicted.remote, "too_many_connections", "too many handshakes at once; this was the slowest"
            )
        if not admitted:
            pending.close()
        if full:
            self.refused(None, pending.remote, "too_many_connections", "limit of connections reached")

    def _longest_silent(self) -> _Line:
        """Of the address that has most handshakes under way."""
        ((crowd, _),) = Counter(self._handshakes.values()).most_common(1)
        return next(line for line, host in self._handshakes.items() if host == crowd)


class _Line:
    """One accepted connection over its whole life, on its own thread."""

    def __init__(self, door: Door, pending: PendingChannel) -> None:
        self.waker = Waker()
        self._door = door
        self._pending = pending
        self._session: ServedSession | None = None
        self._finishing = False
        self.remote = pending.remote
        self.thread = Thread(target=self._run, name="farfill-kv-receive", daemon=True)

    def finish(self) -> None:
        """End after what is queued."""
        self._finishing = True
        session = self._session
        if session is None:
            self.waker.stop()
        else:
            session.finish()

    def _run(self) -> None:
        door = self._door
        try:
            self._serve()
        except TransportInterruptedError:
            pass
        except TransportError as error:
            door.refused(None, self._pending.remote, error.reason, str(error))
        finally:
            door.line_over(self)
            self.waker.close()

    def _serve(self) -> None:
        door = self._door
        try:
            channel = self._pending.handshake(timeout_s=door.liveness.handshake_s, interrupt=self.waker)
        finally:
            door.handshake_over(self)
        session = door.make_session(channel.peer, self._pending.remote, self.waker)
        self._session = session
        if self._finishing:
            session.finish()
        Connection(channel, session, self.waker, door.clock).run(door.reactor)
