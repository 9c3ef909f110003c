"""The receiving end of data connections: accepts them, one thread each, and takes frames to their transfers."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, Thread
from typing import Protocol

import structlog

from farfill.clock import Clock
from farfill.core.errors import IncompatiblePeerError, ProtocolError
from farfill.transfer.budget import ReceiveBudget
from farfill.transfer.hello import hello_problem
from farfill.transfer.incoming import AwaitedTransfer, Scratch
from farfill.transfer.limits import Liveness
from farfill.transfer.observer import TransferObserver
from farfill.transfer.session import PeerSession
from farfill.transfer.waiting import until
from farfill.transport.connection import Connection
from farfill.transport.errors import TransportError, TransportInterruptedError
from farfill.transport.protocol import ChunkSink, Listener, OutgoingFrame, PendingChannel, Receive, Transport
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import (
    FrameHeader,
    FrameType,
    HelloPayload,
    OpenPayload,
    ReasonPayload,
    decode_payload,
)

MAX_CONNECTIONS = 1024
# Peers that have not proved who they are may hold no more threads than this.
MAX_HANDSHAKES = 128
ACCEPT_RETRY_S = 0.1
LAST_WORDS_S = 0.5
JOIN_S = 5.0

_log = structlog.get_logger(__name__)


class Host(Protocol):
    """The receiver, as connections see it."""

    me: HelloPayload
    budget: ReceiveBudget
    allowed_peers: Sequence[str]

    def peer_connected(self, peer: str, generation: str) -> None: ...

    def peer_gone(self, peer: str, generation: str) -> None: ...

    def peer_refused(self, peer: str, reason: str, detail: str) -> None: ...

    def opened(self, session: AcceptorSession, key: bytes, payload: OpenPayload) -> None: ...

    def failed(self, session: AcceptorSession, key: bytes, payload: ReasonPayload) -> None: ...

    def transfer(self, session: AcceptorSession, key: bytes) -> AwaitedTransfer | None: ...

    def stray(self, session: AcceptorSession, key: bytes) -> str: ...


class Acceptor:
    """Owns the listener, the connections and their threads."""

    def __init__(
        self,
        listen: str,
        transport: Transport,
        host: Host,
        *,
        liveness: Liveness,
        clock: Clock,
        observer: TransferObserver,
    ) -> None:
        self.host = host
        self.clock = clock
        self.observer = observer
        self.liveness = liveness
        self._listen = listen
        self._transport = transport
        self._listener: Listener | None = None
        self._waker = Waker()
        self._lock = Lock()
        self._lines: set[_Line] = set()
        self._handshakes = 0
        self._peers = 0
        self._sessions: dict[str, list[AcceptorSession]] = {}
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

    def sessions(self, peer: str, generation: str | None) -> list[AcceptorSession]:
        """Standing connections of a peer, the latest first; of any run when `generation` is None."""
        with self._lock:
            return [s for s in reversed(self._sessions.get(peer, ())) if generation in (None, s.peer_generation)]

    # For connections

    def welcomed(self, session: AcceptorSession) -> None:
        """A peer proved that it may send."""
        with self._lock:
            sessions = self._sessions.setdefault(session.peer_name, [])
            sessions.append(session)
            standing = len(sessions)
        self._share_credit([session])
        self.observer.connections(session.peer_name, standing)
        self.host.peer_connected(session.peer_name, session.peer_generation)

    def over(self, session: AcceptorSession) -> None:
        """A welcomed connection ended."""
        with self._lock:
            sessions = self._sessions[session.peer_name]
            sessions.remove(session)
            standing = len(sessions)
            gone = not any(s.peer_generation == session.peer_generation for s in sessions)
            if not sessions:
                del self._sessions[session.peer_name]
        self._share_credit([])
        self.observer.connections(session.peer_name, standing)
        if gone:
            self.host.peer_gone(session.peer_name, session.peer_generation)

    def _share_credit(self, newcomers: list[AcceptorSession]) -> None:
        """Tell newcomers their credit, and everybody when the number of senders changed."""
        with self._lock:
            peers = len(self._sessions)
            everybody = [session for sessions in self._sessions.values() for session in sessions]
            changed, self._peers = peers != self._peers, peers
            credit = self.host.budget.share(peers)
        for session in everybody if changed else newcomers:
            session.send(FrameHeader(FrameType.CREDIT, offset=credit))

    def refused(self, peer: str | None, remote: str, reason: str, detail: str) -> None:
        """A connection was turned away; `peer` is its certified name, if it has one."""
        self.observer.refused(reason)
        _log.warning("transfer_connection_refused", peer=peer, remote=remote, reason=reason, detail=detail)
        if peer is not None and not self.sessions(peer, None):
            self.host.peer_refused(peer, reason, detail)

    def handshake_over(self) -> None:
        """A connection is no longer anonymous."""
        with self._lock:
            self._handshakes -= 1

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
        with self._lock:
            full = len(self._lines) >= MAX_CONNECTIONS or self._handshakes >= MAX_HANDSHAKES
            if not full and not self._waker.stopped:
                line = _Line(self, pending)
                self._lines.add(line)
                self._handshakes += 1
                line.thread.start()
                return
        pending.close()
        if full:
            self.refused(None, pending.remote, "too_many_connections", "limit of connections reached")


class _Line:
    """One accepted connection over its whole life, on its own thread."""

    def __init__(self, acceptor: Acceptor, pending: PendingChannel) -> None:
        self.waker = Waker()
        self._acceptor = acceptor
        self._pending = pending
        self._session: AcceptorSession | None = None
        self._finishing = False
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
        acceptor = self._acceptor
        try:
            self._serve()
        except TransportInterruptedError:
            pass
        except TransportError as error:
            acceptor.refused(None, self._pending.remote, error.reason, str(error))
        finally:
            acceptor.line_over(self)
            self.waker.close()

    def _serve(self) -> None:
        acceptor = self._acceptor
        try:
            channel = self._pending.handshake(timeout_s=acceptor.liveness.handshake_s, interrupt=self.waker)
        finally:
            acceptor.handshake_over()
        session = AcceptorSession(acceptor, channel.peer, self._pending.remote, self.waker)
        self._session = session
        if self._finishing:
            session.finish()
        Connection(channel, session, self.waker, acceptor.clock).run()


class AcceptorSession(PeerSession):
    """The receiver's end of one connection."""

    def __init__(self, acceptor: Acceptor, peer: PeerIdentity, remote: str, waker: Waker) -> None:
        super().__init__(acceptor.host.me, peer.name, waker, acceptor.liveness, acceptor.clock.now_s())
        self._acceptor = acceptor
        self._host = acceptor.host
        self._remote = remote
        self._peer = peer
        self._scratch = Scratch(acceptor.host.budget, peer.name, acceptor.liveness.dead_s)
        self._refused = False

    def next_frame(self, now_s: float) -> OutgoingFrame | None:
        return self.next_control()

    def control(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        self.heard(now_s)
        if not self.welcomed:
            if header.type is not FrameType.HELLO:
                raise ProtocolError(f"{header.type.name} before HELLO", reason="bad_frame")
            self._hello(decode_payload(HelloPayload, payload))
            return
        match header.type:
            case FrameType.OPEN:
                self._host.opened(self, header.transfer, decode_payload(OpenPayload, payload))
            case FrameType.FAIL:
                self._host.failed(self, header.transfer, decode_payload(ReasonPayload, payload))
            case FrameType.KEEPALIVE:
                transfer = self._host.transfer(self, header.transfer)
                if transfer is not None:
                    transfer.heard()
            case FrameType.RESUME | FrameType.FINISH:
                transfer = self._host.transfer(self, header.transfer)
                if transfer is None:  # it is over: asking means that the answer was lost
                    self._host.stray(self, header.transfer)
                elif header.type is FrameType.RESUME:
                    transfer.resume(self)
            case _:
                self.answered(header, now_s)

    def chunk(self, header: FrameHeader, now_s: float) -> ChunkSink:
        if not self.welcomed:
            raise ProtocolError("CHUNK before HELLO", reason="bad_frame")
        transfer = self._host.transfer(self, header.transfer)
        if transfer is not None:
            return transfer.landing(header, self, self._scratch)
        return _Stray(self._host, self, header, self._scratch)

    def closed(self, error: Exception | None) -> None:
        if self.welcomed:
            self._acceptor.over(self)
            if isinstance(error, ProtocolError | IncompatiblePeerError):
                self._acceptor.refused(None, self._remote, error.reason, f"{self.peer_name}: {error}")
        elif not self._refused and error is not None and not isinstance(error, TransportInterruptedError):
            reason = getattr(error, "reason", "connection_lost")
            peer = self.peer_name if isinstance(error, IncompatiblePeerError) else None
            self._acceptor.refused(peer, self._remote, reason, str(error))

    def bytes_came(self) -> None:
        """Payload bytes are signs of life."""
        self.heard(self._acceptor.clock.now_s())

    def dropped(self, reason: str) -> None:
        """A chunk for no live transfer was discarded."""
        self._acceptor.observer.dropped(reason)

    def _hello(self, hello: HelloPayload) -> None:
        error = hello_problem(self.me, hello, self._peer, self._host.allowed_peers)
        if error is not None:
            self._refused = True
            self.refuse(error.reason, str(error))
            self._acceptor.refused(self.peer_name, self._remote, error.reason, str(error))
            return
        self.peer_generation = hello.generation
        self.welcomed = True
        self.send(FrameHeader(FrameType.WELCOME), self.me)
        self._acceptor.welcomed(self)


class _Stray:
    """Discards a chunk for no live transfer."""

    def __init__(self, host: Host, session: AcceptorSession, header: FrameHeader, scratch: Scratch) -> None:
        self._host = host
        self._session = session
        self._header = header
        self._scratch = scratch
        self.remaining = header.wire_bytes

    def fill(self, receive: Receive) -> int | None:
        received = receive(self._scratch.drain[: self.remaining])
        if received:
            self.remaining -= received
            self._session.bytes_came()
        return received

    def complete(self) -> None:
        self._session.dropped(self._host.stray(self._session, self._header.transfer))

    def abandon(self) -> None:
        pass
