"""The connections of one link, dialled by this end or by the other."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from farfill.transfer.sender_session import SenderSession
from farfill.transfer.slot import Slot
from farfill.transport.waker import Waker
from farfill.wire.frames import FrameHeader, FrameType


class AdoptedSlot:
    """A connection the other end dialled. Its thread belongs to the door it came through."""

    alive = False

    def __init__(self, lanes: Lanes, number: int, waker: Waker) -> None:
        self.waker = waker
        self.number = number
        self.failed = False
        self.standing = False
        self.session: SenderSession | None = None
        self._lanes = lanes

    def tell(self, connections: int) -> None:
        """How many the path needs."""
        if self.session is not None:
            self.session.send(FrameHeader(FrameType.CONNECTIONS, offset=connections))

    def retry_now(self) -> None:
        """Only the other end can."""

    def stop(self) -> None:
        """End after what is queued."""
        if self.session is not None:
            self.session.finish()

    def abort(self) -> None:
        """End at once."""
        self.waker.stop()

    def over(self) -> None:
        """It ended, and nothing follows."""
        self._lanes.abandon(self)


class Lanes:
    """`dialled` makes a connection of that number. Thread-safe; calls nobody who might ask for the link's lock."""

    def __init__(self, dialled: Callable[[int], Slot]) -> None:
        self._dialled = dialled
        self._lock = Lock()
        self._numbers = 0
        # A new list each time: other threads walk the old one meanwhile.
        self._slots: list[Slot | AdoptedSlot] = []
        self._retired: list[Slot | AdoptedSlot] = []
        self._dialling = False
        self._told = 0

    def start(self, wanted: int) -> None:
        """Dial so many."""
        self._dialling = True
        self.resize(wanted)

    def resize(self, wanted: int) -> None:
        """Keep so many; one that is too many ends after what it has. If the other end dials, it is told."""
        with self._lock:
            if wanted != self._told:
                self._told = wanted
                for slot in self._slots:
                    if isinstance(slot, AdoptedSlot):
                        slot.tell(wanted)
            self._retired = [slot for slot in self._retired if slot.alive]
            while self._dialling and len(self._slots) < wanted:
                slot = self._dialled(self._numbers)
                self._numbers += 1
                self._slots = [*self._slots, slot]
                slot.thread.start()
            while self._dialling and len(self._slots) > wanted:
                *self._slots, last = self._slots
                self._retired = [*self._retired, last]
                last.stop()

    def adopt(self, waker: Waker, session: Callable[[AdoptedSlot], SenderSession]) -> SenderSession:
        """One that the peer dialled; `session` makes what is said there."""
        with self._lock:
            slot = AdoptedSlot(self, self._numbers, waker)
            self._numbers += 1
            adopted = slot.session = session(slot)
            self._slots = [*self._slots, slot]
            if self._told:
                slot.tell(self._told)
        return adopted

    def abandon(self, slot: AdoptedSlot) -> None:
        """It is closed."""
        with self._lock:
            self._slots = [other for other in self._slots if other is not slot]

    def retry_now(self) -> None:
        """Those that wait for their next attempt try at once."""
        for slot in self._slots:
            slot.retry_now()

    def wake(self) -> None:
        """There may be something to send."""
        for slot in self._slots:
            slot.waker.wake()

    def stop(self) -> None:
        """Let them say what they still have to say, then end."""
        self._dialling = False
        for slot in self._slots:
            slot.stop()

    def abort(self) -> None:
        """End them at once."""
        self._dialling = False
        for slot in [*self._slots, *self._retired]:
            slot.abort()

    @property
    def count(self) -> int:
        """Those that stand or are to."""
        return len(self._slots)

    @property
    def standing(self) -> int:
        """Those that were welcomed."""
        return sum(slot.standing for slot in self._slots)

    @property
    def down(self) -> bool:
        """Whether none stands and each was tried in vain."""
        return all(slot.failed and not slot.standing for slot in self._slots)

    @property
    def alive(self) -> bool:
        """Whether a thread still runs."""
        return any(slot.alive for slot in [*self._slots, *self._retired])
