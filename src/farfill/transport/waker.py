"""Wakes a thread that waits in `poll`, or whatever was attached, from any other thread."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Callable

from farfill.transport.errors import TransportInterruptedError, TransportTimeoutError


class Waker:
    """A self-pipe. `wake` is safe from any thread, also after `close`; wakes before `clear` count once."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._woken = False
        self._notify: Callable[[], None] | None = None
        self.stopped = False

    def fileno(self) -> int:
        """Readable while a wake is pending that nobody was notified of."""
        return self._reader.fileno()

    def attach(self, notify: Callable[[], None]) -> None:
        """From now on `notify` is called instead of making the pipe readable, at once if a wake is pending."""
        self._notify = notify
        if self._woken:
            notify()

    def detach(self) -> None:
        """Back to the pipe."""
        self._notify = None

    def wake(self) -> None:
        """End the current or the next wait."""
        if self._woken:
            return
        self._woken = True
        notify = self._notify
        if notify is not None:
            notify()
            return
        with contextlib.suppress(OSError):  # full: a wake is pending anyway; closed: nobody waits
            self._writer.send(b"\0")

    def stop(self) -> None:
        """Wake for good: the waiting thread shall end."""
        self.stopped = True
        self._woken = True
        notify = self._notify
        if notify is not None:
            notify()
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget pending wakes. Look for work only after this, never before."""
        if self._notify is None:
            with contextlib.suppress(BlockingIOError):
                while self._reader.recv(64):
                    pass
        self._woken = False

    def close(self) -> None:
        """Free both ends."""
        self._woken = True
        self._reader.close()
        self._writer.close()

    def wait_for(self, fileno: int, mask: int, deadline_s: float) -> None:
        """Wait until `fileno` is ready for `mask`.

        Raises TransportTimeoutError at `deadline_s` (monotonic), TransportInterruptedError once stopped.
        """
        poll = select.poll()
        poll.register(fileno, mask)
        poll.register(self._reader.fileno(), select.POLLIN)
        while not self.stopped:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransportTimeoutError("no answer in time")
            ready = {fd for fd, _ in poll.poll(None if math.isinf(left_s) else left_s * 1000)}
            if self.stopped:
                break
            if fileno in ready:
                return
            if self._reader.fileno() in ready:
                self.clear()
        raise TransportInterruptedError("closed from this side")

    def sleep(self, seconds: float) -> None:
        """Sleep unless woken or stopped."""
        poll = select.poll()
        poll.register(self._reader.fileno(), select.POLLIN)
        if not self.stopped and not self._woken:
            poll.poll(max(0.0, seconds) * 1000)
        self.clear()
