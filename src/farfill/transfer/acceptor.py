"""The receiving end of data connections: takes frames to their transfers, and knows which senders are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Protocol

import structlog

from farfill.clock import Clock
from farfill.core.errors import IncompatiblePeerError, ProtocolError
from farfill.telemetry.log_limit import LimitedWarnings
from farfill.transfer.budget import ReceiveBudget
from farfill.transfer.door import JOIN_S, Door
from farfill.transfer.early import EarlyChunks, Waiting, key_of, landing_or_refused
from farfill.transfer.hello import hello_problem
from farfill.transfer.incoming import AwaitedTransfer
from farfill.transfer.landing import Scratch
from farfill.transfer.limits import Liveness
from farfill.transfer.observer import TransferObserver
from farfill.transfer.session import PeerSession
from farfill.transfer.waiting import until
from farfill.transport.errors import TransportInterruptedError, TransportTimeoutError
from farfill.transport.protocol import ChunkSink, OutgoingFrame, PathSample, Receive, Transport
from farfill.transport.reactor import Reactor
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker
from farfill.wire.frames import (
    FLAG_EARLY,
    EarlyGrant,
    FrameHeader,
    FrameType,
    HelloPayload,
    OpenPayload,
    ReasonPayload,
    decode_payload,
)

_log = structlog.get_logger(__name__)


class Host(Protocol):
    """The receiver, as connections see it."""

    me: HelloPayload
    budget: ReceiveBudget
    early: EarlyChunks
    allowed_peers: Sequence[str]

    def early_grant(self, credit_bytes: int) -> EarlyGrant: ...

    def may_open(self, session: AcceptorSession, key: bytes) -> bool: ...

    def peer_connected(self, peer: str, generation: str) -> None: ...

    def peer_gone(self, peer: str, generation: str, *, silent: bool) -> None: ...

    def peer_refused(self, peer: str, reason: str, detail: str) -> None: ...

    def opened(self, session: AcceptorSession, key: bytes, payload: OpenPayload) -> None: ...

    def failed(self, session: AcceptorSession, key: bytes, payload: ReasonPayload) -> None: ...

    def transfer(self, session: AcceptorSession, key: bytes) -> AwaitedTransfer | None: ...

    def stray(self, session: AcceptorSession, key: bytes) -> str: ...


class Dialler(Protocol):
    """A pool of connections this end dials."""

    def measured(self, rtt_s: float) -> None:
        """The round trip of one of them."""
        ...

    def resize(self, connections: int) -> None:
        """The sender says how many the path needs."""
        ...


class Acceptor:
    """Knows the standing connections of every sender, whoever dialled them. `listen` None: nobody is let in."""

    def __init__(
        self,
        listen: str | None,
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
        self.reactor = Reactor("farfill-kv-receive")
        self._refusals = LimitedWarnings(_log, "transfer_connection_refused", clock.now_s)
        self._lock = Lock()
        self._peers = 0
        self._sessions: dict[str, list[AcceptorSession]] = {}
        self._door: Door | None = None
        if listen is not None:
            self._door = Door(
                listen,
                transport,
                self.session,
                self.refused,
                liveness=liveness,
                clock=clock,
                reactor=self.reactor,
            )

    @property
    def address(self) -> str:
        """host:port it listens on; the configured one before `start`; empty when it does not listen."""
        return self._door.address if self._door is not None else ""

    def start(self) -> None:
        """Bind and accept. Raises TransportError."""
        if self._door is not None:
            self._door.start()

    async def close(self) -> None:
        """Stop accepting, let connections say what is queued, end every thread. Idempotent."""
        if self._door is not None:
            await self._door.close()
        await until(lambda: not self.reactor.alive, JOIN_S)
        self._refusals.tell_left_out(at_once=True)

    def tick(self) -> None:
        """Call now and then."""
        self._refusals.tell_left_out()

    def session(self, peer: PeerIdentity, remote: str, waker: Waker, dialler: Dialler | None = None) -> AcceptorSession:
        """What is said on a new connection with `peer`; `dialler` is who dialled it, if this end did."""
        return AcceptorSession(self, peer, remote, waker, dialler)

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

    def over(self, session: AcceptorSession, *, silent: bool) -> None:
        """A welcomed connection ended; `silent`: because nothing came."""
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
            self.host.peer_gone(session.peer_name, session.peer_generation, silent=silent)

    def _share_credit(self, newcomers: list[AcceptorSession]) -> None:
        """Tell newcomers their credit, and everybody when the number of senders changed."""
        with self._lock:
            peers = len(self._sessions)
            everybody = [session for sessions in self._sessions.values() for session in sessions]
            changed, self._peers = peers != self._peers, peers
            credit = self.host.budget.share(peers)
        for session in everybody if changed else newcomers:
            session.send(FrameHeader(FrameType.CREDIT, offset=credit), self.host.early_grant(credit))

    def refused(self, peer: str | None, remote: str, reason: str, detail: str) -> None:
        """A connection was turned away; `peer` is its certified name, if it has one."""
        self.observer.refused(reason)
        self._refusals.warning(reason, peer=peer, remote=remote, detail=detail)
        if peer is not None and not self.sessions(peer, None):
            self.host.peer_refused(peer, reason, detail)


class AcceptorSession(PeerSession):
    """The receiver's end of one connection."""

    def __init__(
        self, acceptor: Acceptor, peer: PeerIdentity, remote: str, waker: Waker, dialler: Dialler | None
    ) -> None:
        super().__init__(acceptor.host.me, peer.name, waker, acceptor.liveness, acceptor.clock.now_s())
        self._acceptor = acceptor
        self._host = acceptor.host
        self._remote = remote
        self._peer = peer
        self._dialler = dialler
        self._scratch = Scratch(acceptor.host.budget, peer.name, acceptor.liveness.dead_s)
        self._refused = False
        self._lock = Lock()
        self._to_place: deque[Waiting] = deque()
        self._over = False

    def sampled(self, path: PathSample) -> None:
        if self._dialler is not None:
            self._dialler.measured(path.rtt_s)

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
            case FrameType.CONNECTIONS:
                if self._dialler is not None:
                    self._dialler.resize(header.offset)
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

    def chunk(self, header: FrameHeader, now_s: float) -> ChunkSink | None:
        if not self.welcomed:
            raise ProtocolError("CHUNK before HELLO", reason="bad_frame")
        transfer = self._host.transfer(self, header.transfer)
        early = bool(header.flags & FLAG_EARLY)
        if transfer is not None and (transfer.opened or not early):
            if header.codec and not self._scratch.has_room(header.wire_bytes, self.wake, now_s):
                self.heard(now_s)  # it is we who do not listen
                return None
            if early:
                return landing_or_refused(lambda: transfer.landing(header, self, self._scratch), header, self)
            return transfer.landing(header, self, self._scratch)
        if early and self._host.may_open(self, header.transfer):
            return self._host.early.sink(header, self, self._early_landed)
        return _Stray(self._host, self, header, self._scratch)

    def place(self, chunk: Waiting) -> None:
        """See `early.Carrier`."""
        with self._lock:
            if not self._over:
                self._to_place.append(chunk)
                self.wake()
                return
        self._host.early.drop([chunk])

    def tick(self, now_s: float, path: Callable[[], PathSample | None]) -> float:
        while self._to_place:
            chunk = self._to_place[0]
            sink = self.chunk(chunk.header, now_s)
            if sink is None:
                break
            self._to_place.popleft()
            try:
                chunk.pour(sink)
            finally:
                self._host.early.release(self, chunk.memory)
        return super().tick(now_s, path)

    def _early_landed(self, chunk: Waiting) -> None:
        key = chunk.header.transfer
        self._host.early.keep(chunk)
        transfer = self._host.transfer(self, key)
        if transfer is not None and transfer.opened:  # meanwhile
            self._host.early.opened(key_of(self, key))

    def closed(self, error: Exception | None) -> None:
        with self._lock:
            self._over = True
            self._scratch.close()
        self._host.early.drop(self._to_place)
        self._host.early.closed(self)
        if self.welcomed:
            self._acceptor.over(self, silent=isinstance(error, TransportTimeoutError))
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
