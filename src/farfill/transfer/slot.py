"""One connection of a pool over its whole life: dials, has it served by the reactor, dials again after a pause.

Which end dials is a matter of configuration; what is said on the connection is the pool's.
"""

from __future__ import annotations

import random
import time
from threading import Thread
from typing import Protocol

from farfill.clock import Clock
from farfill.transfer.door import ServedSession
from farfill.transfer.limits import Liveness
from farfill.transport.connection import Connection
from farfill.transport.errors import IdentityError, TransportError, TransportInterruptedError
from farfill.transport.protocol import Channel, Transport
from farfill.transport.reactor import Reactor
from farfill.transport.tls import PeerIdentity
from farfill.transport.waker import Waker

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
# While a transfer waits for a link that stood before, so that it goes on soon after the link is back.
BACKOFF_MAX_WANTED_S = 0.2
# Without a transfer to serve, an unreachable peer is left alone after so many attempts per connection.
IDLE_DIALS = 3
# A SYN that got lost is repeated by the kernel after a second only: a new attempt is sooner. Should a queue have made
# round trips longer than ever before, all of them would be too short: after so many in a row they are given more time.
CONNECT_MIN_S = 0.25
CONNECT_ROUND_TRIPS = 8
QUICK_CONNECTS = 8
SLOW_CONNECT_FACTOR = 4


class Dialling(Protocol):
    """Whom to dial, and what to say there."""

    address: str
    peer_name: str
    transport: Transport
    clock: Clock
    reactor: Reactor
    liveness: Liveness

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a connection."""
        ...

    @property
    def rtt_s(self) -> float | None:
        """The round trip, once the peer was reached."""
        ...

    def session(self, slot: Slot, peer: PeerIdentity) -> ServedSession: ...

    def attempt_failed(self, error: Exception) -> None: ...

    def refused(self, reason: str, detail: str) -> None: ...


class Slot:
    """One connection of the pool over its whole life, on its own thread."""

    def __init__(self, pool: Dialling, number: int) -> None:
        self.waker = Waker()
        self.failed = False
        self.standing = False
        self.number = number
        self._pool = pool
        self._retry_now = False
        self._stopping = False
        self._session: ServedSession | None = None
        self.thread = Thread(target=self._run, name=f"farfill-kv-dial-{pool.peer_name}-{number}", daemon=True)

    def retry_now(self) -> None:
        """Forget past failures."""
        if not self.standing:
            self.failed = False
        self._retry_now = True
        self.waker.wake()

    def stop(self) -> None:
        """End after what is queued."""
        self._stopping = True
        session = self._session
        if session is None:
            self.waker.stop()
        else:
            session.finish()

    def abort(self) -> None:
        """End at once."""
        self.waker.stop()

    def over(self) -> None:
        """Its connection ended; the next one is dialled."""

    @property
    def alive(self) -> bool:
        """Whether its thread still runs."""
        return self.thread.is_alive()

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping and not self.waker.stopped:
                if self._retry_now:
                    self._retry_now = False
                    failures = 0
                if failures >= IDLE_DIALS and not self._pool.wanted:
                    self.waker.sleep(BACKOFF_MAX_S)
                    continue
                began_s = time.monotonic()
                if self._serve(failures):
                    failures, began_s = 0, time.monotonic()
                failures += 1
                self._back_off(failures, began_s)
        finally:
            self.waker.close()

    def _serve(self, failures: int) -> bool:
        """One connection from dialling to its end; whether it was welcomed."""
        try:
            channel = self._dial(failures)
        except TransportInterruptedError:
            return False
        except TransportError as error:
            self.failed = True
            if isinstance(error, IdentityError):
                self._pool.refused(error.reason, str(error))
            self._pool.attempt_failed(error)
            return False
        session = self._pool.session(self, channel.peer)
        self._session = session
        if self._stopping:
            session.finish()
        Connection(channel, session, self.waker, self._pool.clock).run(self._pool.reactor)
        self._session = None
        return session.welcomed

    def _dial(self, failures: int) -> Channel:
        pool = self._pool
        rtt_s = pool.rtt_s
        patience = random.uniform(0.5, 1.0) * (1 if failures < QUICK_CONNECTS else SLOW_CONNECT_FACTOR)  # noqa: S311
        channel = pool.transport.dial(
            pool.address,
            timeout_s=pool.liveness.handshake_s,
            connect_s=None if rtt_s is None else max(CONNECT_MIN_S, CONNECT_ROUND_TRIPS * rtt_s) * patience,
            interrupt=self.waker,
        )
        if channel.peer.name != pool.peer_name:
            channel.close()
            raise IdentityError(f"{pool.address} is {channel.peer.name!r}, not {pool.peer_name!r}")
        return channel

    def _back_off(self, failures: int, began_s: float) -> None:
        """Wait longer each time, by chance a little more or less; a new transfer cuts it short.

        An attempt that took that long already, as one does whose SYN was lost, is followed by the next.
        """
        longest_s = BACKOFF_MAX_WANTED_S if self._pool.wanted and self._pool.rtt_s is not None else BACKOFF_MAX_S
        wait_s = min(BACKOFF_FIRST_S * 2 ** (failures - 1), longest_s) * random.uniform(0.5, 1.5)  # noqa: S311
        until_s = began_s + wait_s
        while not (self._retry_now or self._stopping or self.waker.stopped):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            self.waker.sleep(left_s)
