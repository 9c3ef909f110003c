"""Orders to ranks and their answers over a socket pair."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from farfill.engine.torch.ranks.messages import Allocate, Channel, Decode, Disconnected, Done, Prefill, Wait
from farfill.engine.torch.ranks.shared_kv import mapped, shared_memory


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


def test_orders_arrive_in_order_and_whole(ends: tuple[Channel, Channel]) -> None:
    lead, follower = ends
    orders = [
        Decode(((3, 5), (4, 6)), merged=True, freed=(1, 2)),
        Prefill(3, tuple(range(100_000)), interruptible=True, chunked=False),
        Wait(),
    ]
    sender = threading.Thread(target=lambda: [lead.send(order) for order in orders])
    sender.start()
    assert [follower.order() for _ in orders] == [(order, None) for order in orders]
    sender.join()


def test_memory_comes_with_its_order(ends: tuple[Channel, Channel]) -> None:
    lead, follower = ends
    descriptor, ours = shared_memory(4096)
    lead.send(Allocate(7, 16), descriptor)
    lead.send(Wait())
    os.close(descriptor)
    order, received = follower.order()
    assert order == Allocate(7, 16)
    assert received is not None
    theirs = mapped(received, 4096)
    os.close(received)
    ours[5] = 42
    assert theirs[5] == 42
    assert np.count_nonzero(theirs) == 1
    assert follower.order() == (Wait(), None)


def test_answers_have_a_deadline(ends: tuple[Channel, Channel]) -> None:
    lead, follower = ends
    with pytest.raises(TimeoutError, match="no answer in time"):
        lead.done(0.01)
    follower.send(Done("out of memory", 1.5, 2.5))
    assert lead.done(10.0) == Done("out of memory", 1.5, 2.5)


def test_a_closed_end_is_told_from_a_slow_one(ends: tuple[Channel, Channel]) -> None:
    lead, follower = ends
    follower.close()
    with pytest.raises(Disconnected):
        lead.done(10.0)
    with pytest.raises(Disconnected):
        lead.send(Wait())
