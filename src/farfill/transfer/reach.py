"""Connections a receiver dials itself, where a firewall lets only the decode side open them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from farfill.topology.connections import FEW, MANY
from farfill.transfer.acceptor import Acceptor, AcceptorSession
from farfill.transfer.slot import Slot
from farfill.transfer.waiting import until
from farfill.transport.protocol import Transport
from farfill.transport.tls import PeerIdentity

UNUSED_S = 60.0
LAST_WORDS_S = 0.5
JOIN_S = 5.0


class Reach:
    """One pool per sender's address, from its first expected transfer until it was unused for a while."""

    def __init__(
        self, acceptor: Acceptor, transport: Transport, connections: int | None, expects: Callable[[str], bool]
    ) -> None:
        """`connections` None: as many as the sender asks for. `expects`: whether anything is expected from the sender
        of that name.
        """
        self.acceptor = acceptor
        self.transport = transport
        self.expects = expects
        self._connections = connections
        self._lock = Lock()
        self._peers: dict[tuple[str, str], ReachedPeer] = {}
        self._retired: list[ReachedPeer] = []
        self._closed = False

    def towards(self, address: str, peer_name: str) -> None:
        """Have connections to that sender; one that waits for its next attempt tries at once."""
        with self._lock:
            if self._closed:
                return
            known = self._peers.get((address, peer_name))
            peer = known or ReachedPeer(self, address, peer_name, self._connections)
            self._peers[address, peer_name] = peer
        peer.start() if known is None else peer.retry_now()

    def tick(self) -> None:
        """Give up pools of senders that are gone."""
        with self._lock:
            for key, peer in list(self._peers.items()):
                if peer.unused_s() > UNUSED_S:
                    del self._peers[key]
                    self._retired.append(peer)
                    peer.stop()
            self._retired = [peer for peer in self._retired if peer.alive]

    async def close(self) -> None:
        """Let connections say what is queued, end every thread. Idempotent."""
        with self._lock:
            self._closed = True
            peers = [*self._peers.values(), *self._retired]
        for peer in peers:
            peer.stop()
        if not await until(lambda: not any(peer.alive for peer in peers), LAST_WORDS_S):
            for peer in peers:
                peer.abort()
            await until(lambda: not any(peer.alive for peer in peers), JOIN_S)


class ReachedPeer:
    """Implements `slot.Dialling`: the pool of one sender."""

    def __init__(self, reach: Reach, address: str, peer_name: str, connections: int | None) -> None:
        self.address = address
        self.peer_name = peer_name
        self.transport = reach.transport
        self.clock = reach.acceptor.clock
        self.reactor = reach.acceptor.reactor
        self.liveness = reach.acceptor.liveness
        self._reach = reach
        self._rtt_s: float | None = None
        self._used_s = self.clock.now_s()
        self._fixed = connections is not None
        self._lock = Lock()
        self._numbers = 0
        # A new list each time: other threads walk the old one meanwhile.
        self._slots: list[Slot] = []
        self._retired: list[Slot] = []
        self._stopped = False
        self._first = connections or FEW

    def start(self) -> None:
        """Start dialling."""
        self._keep(self._first)

    def resize(self, connections: int) -> None:
        """See `acceptor.Dialler`. What configuration fixed stays."""
        if not self._fixed:
            self._keep(min(max(1, connections), MANY))

    def _keep(self, connections: int) -> None:
        with self._lock:
            self._retired = [slot for slot in self._retired if slot.alive]
            while not self._stopped and len(self._slots) < connections:
                slot = Slot(self, self._numbers)
                self._numbers += 1
                self._slots = [*self._slots, slot]
                slot.thread.start()
            while len(self._slots) > connections:
                *self._slots, last = self._slots
                self._retired = [*self._retired, last]
                last.stop()

    def retry_now(self) -> None:
        """Forget past failures."""
        for slot in self._slots:
            slot.retry_now()

    def stop(self) -> None:
        """End after what is queued."""
        with self._lock:
            self._stopped = True
        for slot in self._slots:
            slot.stop()

    def abort(self) -> None:
        """End at once."""
        for slot in [*self._slots, *self._retired]:
            slot.abort()

    @property
    def alive(self) -> bool:
        """Whether a thread still runs."""
        return any(slot.alive for slot in [*self._slots, *self._retired])

    def unused_s(self) -> float:
        """How long nothing was expected and no connection stood."""
        if self.wanted or self._reach.acceptor.sessions(self.peer_name, None):
            self._used_s = self.clock.now_s()
        return self.clock.now_s() - self._used_s

    # For slots

    @property
    def wanted(self) -> bool:
        """Whether something is expected from there."""
        return self._reach.expects(self.peer_name)

    @property
    def rtt_s(self) -> float | None:
        """The round trip, once the peer was reached."""
        return self._rtt_s

    def session(self, slot: Slot, peer: PeerIdentity) -> AcceptorSession:
        """What is said on a new connection: the same as on one that was accepted."""
        return self._reach.acceptor.session(peer, self.address, slot.waker, self)

    def attempt_failed(self, error: Exception) -> None:
        """Transfers have deadlines of their own."""

    def refused(self, reason: str, detail: str) -> None:
        """Whoever answers there is not the sender."""
        self._reach.acceptor.refused(self.peer_name, self.address, reason, detail)

    def measured(self, rtt_s: float) -> None:
        """See `acceptor.Dialler`."""
        self._rtt_s = rtt_s
