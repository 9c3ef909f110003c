"""The receive budget: leases stay within it, a sender within its share, and everything comes back."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.transfer.budget import ReceiveBudget
from farfill.transport.errors import TransportError

KIB = 1024


def test_credit_is_shared_but_never_below_one_chunk() -> None:
    budget = ReceiveBudget(1000 * KIB, 300 * KIB)
    assert budget.share(0) == budget.share(1) == 1000 * KIB
    assert budget.share(2) == 500 * KIB
    assert budget.share(10) == 300 * KIB


def test_lease_beyond_the_budget_waits_and_then_says_so() -> None:
    budget = ReceiveBudget(100 * KIB, 60 * KIB)
    budget.lease("a", 60 * KIB, 1)
    with pytest.raises(TransportError) as caught:
        budget.lease("b", 60 * KIB, 0.01)
    assert caught.value.reason == "receive_budget"


def test_lease_goes_on_once_memory_came_free() -> None:
    budget = ReceiveBudget(100 * KIB, 60 * KIB)
    first = budget.lease("a", 60 * KIB, 1)
    got: list[bytearray] = []
    waiting = threading.Thread(target=lambda: got.append(budget.lease("b", 60 * KIB, 10)))
    waiting.start()
    assert not got
    budget.release("a", first)
    waiting.join(5)
    assert got
    budget.release("b", got[0])
    assert budget.leased_bytes == 0


def test_stalled_sender_holds_no_more_than_its_share() -> None:
    budget = ReceiveBudget(100 * KIB, 10 * KIB)
    budget.share(2)
    for _ in range(5):
        budget.lease("stalled", 10 * KIB, 1)
    with pytest.raises(TransportError):
        budget.lease("stalled", 10 * KIB, 0.01)
    assert budget.lease("other", 10 * KIB, 0.01) is not None


def test_single_chunk_larger_than_the_budget_still_gets_through_when_nothing_else_is_there() -> None:
    budget = ReceiveBudget(10 * KIB, 10 * KIB)
    memory = budget.lease("a", 64 * KIB, 0.01)
    budget.release("a", memory)
    assert budget.leased_bytes == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40 * KIB), st.booleans()), max_size=60))
def test_memory_never_exceeds_the_budget_and_no_lease_is_handed_out_twice(
    steps: list[tuple[str, int, bool]],
) -> None:
    budget = ReceiveBudget(100 * KIB, 40 * KIB)
    budget.share(3)
    held: list[tuple[str, bytearray]] = []
    for peer, nbytes, give_back in steps:
        if give_back and held:
            owner, memory = held.pop()
            budget.release(owner, memory)
        try:
            memory = budget.lease(peer, nbytes, 0)
        except TransportError:
            continue
        assert len(memory) >= nbytes
        assert all(memory is not other for _, other in held)
        held.append((peer, memory))
        assert budget.leased_bytes == sum(len(memory) for _, memory in held)
        assert budget.leased_bytes + budget._free_bytes <= 100 * KIB
    for owner, memory in held:
        budget.release(owner, memory)
    assert budget.leased_bytes == 0
