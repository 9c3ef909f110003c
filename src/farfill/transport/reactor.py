"""Runs many connections on few threads: idle ones cost nothing, and a hundred busy ones do not fight for a core.

A thread per connection spends more on waking and on taking turns than on bytes once there are dozens, as on a lossy
path. Here each connection belongs to one lane for life, so it is never stepped by two threads at once. A lane's thread
lives as long as it has connections.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import deque
from functools import partial
from threading import Event, Lock, Thread, get_ident
from typing import Protocol

import structlog

from farfill.transport.waker import Waker

# More threads than this find no more work: what a connection does outside the interpreter's lock is ciphering.
MAX_LANES = 8
# Deadlines are looked at no more often than this.
SWEEP_S = 0.01

_log = structlog.get_logger(__name__)


class Stepped(Protocol):
    """What a reactor runs."""

    waker: Waker

    @property
    def wants_read(self) -> bool:
        """Whether it waits for its descriptor to be readable."""
        ...

    @property
    def wants_write(self) -> bool:
        """Whether it waits for its descriptor to be writable."""
        ...

    def fileno(self) -> int: ...

    def step(self, *, readable: bool) -> float | None:
        """Do what can be done without waiting. `readable`: something may have arrived.

        Returns after how many seconds to call again though nothing happens, 0 when there is more to do already, None
        when it wants to be stepped no more. An exception ends it too.
        """
        ...


class Reactor:
    """Shared by the connections of one side. Threads called `name` run while there are any."""

    def __init__(self, name: str, lanes: int | None = None) -> None:
        self._lock = Lock()
        count = lanes or max(1, min(MAX_LANES, os.cpu_count() or 1))
        self._lanes = [_Lane(f"{name}-{number}") for number in range(count)]

    @property
    def alive(self) -> bool:
        """Whether a thread still runs."""
        return any(lane.alive for lane in self._lanes)

    def run(self, stepped: Stepped) -> None:
        """Until its `step` says so; blocks. Raises what `step` raised."""
        with self._lock:
            lane = min(self._lanes, key=lambda lane: lane.load)
            lane.load += 1
        try:
            lane.run(stepped)
        finally:
            with self._lock:
                lane.load -= 1


class _Member:
    """One connection in its lane."""

    def __init__(self, stepped: Stepped) -> None:
        self.stepped = stepped
        self.over = Event()
        self.error: Exception | None = None
        self.due_s = float("-inf")
        self.mask = 0


class _Lane:
    """One thread and the connections it steps. Waits by the monotonic clock, whatever clock the connections go by."""

    def __init__(self, name: str) -> None:
        self.load = 0
        self._name = name
        self._lock = Lock()
        self._ident = 0
        self._thread: Thread | None = None
        self._waker: Waker | None = None
        self._joining: deque[_Member] = deque()
        self._woken: deque[_Member] = deque()
        self._members: set[_Member] = set()
        self._again: list[_Member] = []
        self._earliest_s = float("inf")

    @property
    def alive(self) -> bool:
        """Whether its latest thread still runs."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, stepped: Stepped) -> None:
        """See `Reactor`."""
        member = _Member(stepped)
        with self._lock:
            self._joining.append(member)
            if self._waker is None:
                self._waker = Waker()
                self._thread = Thread(target=self._serve, args=(self._waker,), name=self._name, daemon=True)
                self._thread.start()
            self._waker.wake()
        member.over.wait()
        if member.error is not None:
            raise member.error

    def _serve(self, waker: Waker) -> None:
        self._ident = get_ident()
        with contextlib.closing(waker), selectors.DefaultSelector() as selector:
            selector.register(waker.fileno(), selectors.EVENT_READ)
            try:
                while self._admit(selector):
                    for member, readable in self._work(selector, waker).items():
                        self._step(member, selector, readable=readable)
            except Exception as error:  # whoever waits for a member must not wait for ever
                _log.exception("transfer_lane_crashed", lane=self._name)
                with self._lock:
                    self._waker = None
                    left = [*self._members, *self._joining]
                    self._joining.clear()
                    self._again = []  # whoever comes next must not step those that are parted now
                for member in left:
                    self._part(member, selector, error)

    def _admit(self, selector: selectors.BaseSelector) -> bool:
        """Take in who joined; whether there is anybody. When not, the thread ends."""
        while True:
            with self._lock:
                if not self._joining:
                    if not self._members:
                        self._waker = None
                    return bool(self._members)
                member = self._joining.popleft()
            self._members.add(member)
            member.mask = selectors.EVENT_READ
            try:
                selector.register(member.stepped.fileno(), member.mask, member)
            except (OSError, ValueError, KeyError) as error:
                self._part(member, selector, error)
                continue
            member.stepped.waker.attach(partial(self._wake, member))
            self._again.append(member)

    def _wake(self, member: _Member) -> None:
        self._woken.append(member)
        waker = self._waker
        if waker is not None and get_ident() != self._ident:  # the thread itself looks at them before it waits
            waker.wake()

    def _work(self, selector: selectors.BaseSelector, waker: Waker) -> dict[_Member, bool]:
        """Wait until somebody has something to do: who, and whether there may be something to read."""
        work = dict.fromkeys(self._again, True)
        self._again = []
        idle = not (work or self._woken)
        for key, mask in selector.select(max(0.0, self._earliest_s - time.monotonic()) if idle else 0):
            if key.data is None:
                waker.clear()  # before the queues are looked at
            elif mask & selectors.EVENT_READ:
                work[key.data] = True
            else:
                work.setdefault(key.data, False)
        while self._woken:
            member = self._woken.popleft()
            if member in self._members:
                work.setdefault(member, False)
        now_s = time.monotonic()
        if now_s >= self._earliest_s:
            for member in self._members:
                if member.due_s <= now_s:
                    work[member] = True  # the kernel may hold less than it was told to wait for: signs of life
            later = (member.due_s for member in self._members if member.due_s > now_s)
            self._earliest_s = max(now_s + SWEEP_S, min(later, default=float("inf")))
        return work

    def _step(self, member: _Member, selector: selectors.BaseSelector, *, readable: bool) -> None:
        stepped = member.stepped
        try:
            wait_s = stepped.step(readable=readable)
        except Exception as error:
            self._part(member, selector, error)
            return
        if wait_s is None:
            self._part(member, selector, None)
            return
        if wait_s == 0:
            self._again.append(member)
        member.due_s = time.monotonic() + max(wait_s, SWEEP_S)
        self._earliest_s = min(self._earliest_s, member.due_s)
        mask = (selectors.EVENT_READ if stepped.wants_read else 0) | (
            selectors.EVENT_WRITE if stepped.wants_write else 0
        )
        if mask != member.mask:
            self._interest(member, selector, mask)

    def _interest(self, member: _Member, selector: selectors.BaseSelector, mask: int) -> None:
        before, member.mask = member.mask, mask
        if not mask:
            selector.unregister(member.stepped.fileno())
        elif not before:
            selector.register(member.stepped.fileno(), mask, member)
        else:
            selector.modify(member.stepped.fileno(), mask, member)

    def _part(self, member: _Member, selector: selectors.BaseSelector, error: Exception | None) -> None:
        self._members.discard(member)
        member.stepped.waker.detach()
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(member.stepped.fileno())
        member.error = error
        member.over.set()
