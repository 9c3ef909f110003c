"""Many connections on few threads: each stepped when it has something to do, on one thread, none harmed by another."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from farfill.transport.reactor import Reactor
from farfill.transport.waker import Waker
from support.transfer_harness import eventually

LONG_S = 60.0


class Steps:
    """Something to step. `answer` says what a step returns."""

    def __init__(self, reactor: Reactor, answer: Callable[[], float | None] = lambda: LONG_S) -> None:
        self.waker = Waker()
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.answer = answer
        self.steps: list[bool] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None
        self.wants_read = True
        self.wants_write = False
        self._inside = threading.Lock()
        self.thread = threading.Thread(target=self._run, args=(reactor,))
        self.thread.start()

    def _run(self, reactor: Reactor) -> None:
        try:
            reactor.run(self)
        except Exception as error:
            self.error = error

    def fileno(self) -> int:
        return self.near.fileno()

    def step(self, *, readable: bool) -> float | None:
        assert self._inside.acquire(blocking=False), "two steps at once"
        try:
            self.waker.clear()
            self.threads.add(threading.get_ident())
            self.steps.append(readable)
            if self.waker.stopped:
                return None
            if readable:
                self._drain()
            return self.answer()
        finally:
            self._inside.release()

    def _drain(self) -> None:
        try:
            while self.near.recv(1024):
                pass
        except BlockingIOError:
            pass

    def end(self) -> None:
        self.waker.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.waker.close()
        self.near.close()
        self.far.close()


Make = Callable[..., Steps]


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor("test-lane", lanes=2)
    yield made
    eventually(lambda: not made.alive)


@pytest.fixture
def make(reactor: Reactor) -> Iterator[Make]:
    made: list[Steps] = []

    def one(answer: Callable[[], float | None] = lambda: LONG_S) -> Steps:
        made.append(Steps(reactor, answer))
        eventually(lambda: bool(made[-1].steps))
        return made[-1]

    yield one
    for steps in made:
        steps.end()


def test_first_step_may_read(make: Make) -> None:
    assert make().steps == [True]


def test_wake_and_arrival_each_bring_a_step(make: Make) -> None:
    steps = make()
    steps.waker.wake()
    eventually(lambda: len(steps.steps) == 2)
    assert steps.steps[1] is False, "a wake says nothing of arrivals"
    steps.far.send(b"x")
    eventually(lambda: len(steps.steps) == 3)
    assert steps.steps[2] is True


def test_wake_inside_a_step_brings_another(make: Make) -> None:
    rounds = 5

    def again() -> float:
        if len(steps.steps) < rounds:
            steps.waker.wake()
        return LONG_S

    steps = make()
    steps.answer = again
    steps.waker.wake()
    eventually(lambda: len(steps.steps) == rounds)


def test_more_to_do_is_stepped_at_once_and_time_by_time(make: Make) -> None:
    left = [3]

    def answer() -> float:
        left[0] -= 1
        return 0 if left[0] > 0 else LONG_S

    busy = make(answer)
    eventually(lambda: len(busy.steps) >= 3)
    timed = make(lambda: 0.001)
    eventually(lambda: len(timed.steps) >= 3)
    assert all(timed.steps), "what is there is read then, however little"


def test_writable_is_waited_for_only_when_wanted(make: Make) -> None:
    steps = make()
    before = len(steps.steps)
    steps.wants_write = True
    steps.answer = lambda: LONG_S
    steps.waker.wake()
    eventually(lambda: len(steps.steps) > before + 1)  # the socket is writable: it is stepped again and again
    steps.wants_write = False
    steps.waker.wake()
    eventually(lambda: not _grows(steps))


def test_what_arrives_waits_while_nobody_wants_to_read(make: Make) -> None:
    steps = make()
    steps.wants_read = False
    steps.waker.wake()
    eventually(lambda: len(steps.steps) == 2)
    steps.far.send(b"x")
    steps.waker.wake()
    eventually(lambda: len(steps.steps) == 3)
    assert steps.steps[1:] == [False, False]
    assert not _grows(steps)
    steps.wants_read = True
    steps.waker.wake()
    eventually(lambda: steps.steps[-1] is True)


def _grows(steps: Steps) -> bool:
    before = len(steps.steps)
    time.sleep(0.02)
    return len(steps.steps) != before


def test_each_is_stepped_by_one_thread_and_lanes_share_them(make: Make) -> None:
    all_steps = [make() for _ in range(6)]
    for _ in range(50):
        for steps in all_steps:
            steps.waker.wake()
    eventually(lambda: all(len(steps.steps) > 1 for steps in all_steps))
    assert all(len(steps.threads) == 1 for steps in all_steps)
    assert len(set.union(*(steps.threads for steps in all_steps))) == 2


def test_error_ends_only_its_own(make: Make) -> None:
    def fail() -> float:
        raise ZeroDivisionError

    sound, broken = make(), make()
    broken.answer = fail
    broken.waker.wake()
    broken.thread.join(5)
    assert isinstance(broken.error, ZeroDivisionError)
    before = len(sound.steps)
    sound.waker.wake()
    eventually(lambda: len(sound.steps) > before)


def test_descriptor_that_is_closed_already_is_refused(reactor: Reactor, make: Make) -> None:
    class Closed(Steps):
        def fileno(self) -> int:
            return -1

    sound = make()
    closed = Closed(reactor)
    closed.thread.join(5)
    assert isinstance(closed.error, ValueError)
    closed.end()
    before = len(sound.steps)
    sound.waker.wake()
    eventually(lambda: len(sound.steps) > before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_ever_when_a_lane_itself_breaks(reactor: Reactor) -> None:
    class Broken(Steps):
        @property
        def wants_write(self) -> bool:  # asked outside of the step
            raise RuntimeError("no interest")

        @wants_write.setter
        def wants_write(self, value: bool) -> None: ...

    broken = Broken(reactor, lambda: 0)  # it has more to do
    broken.thread.join(5)
    assert isinstance(broken.error, RuntimeError)
    stepped = len(broken.steps)
    later = [Steps(reactor) for _ in range(4)]  # the lanes start anew
    eventually(lambda: all(steps.steps for steps in later))
    for steps in later:
        steps.end()
    assert len(broken.steps) == stepped, "it is not stepped any more"
    broken.end()


def test_threads_end_with_the_last_connection_and_come_again(reactor: Reactor) -> None:
    for _ in range(20):
        steps = Steps(reactor)
        eventually(lambda steps=steps: bool(steps.steps))
        steps.end()
    eventually(lambda: not reactor.alive)


def test_stopped_before_it_joins_is_told(reactor: Reactor) -> None:
    class Early(Steps):
        def _run(self, reactor: Reactor) -> None:
            self.waker.stop()
            super()._run(reactor)

    early = Early(reactor)
    early.thread.join(5)
    assert early.error is None
    early.end()
