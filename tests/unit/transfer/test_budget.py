"""The receive budget: leases stay within it, a sender within its share, and everything comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farfill.transfer.budget import MAX_FREE, MIN_LEASE_BYTES, ReceiveBudget
from farfill.transfer.incoming import Scratch
from farfill.transport.errors import TransportError

KIB = 1024


def taken(memory: bytearray | None) -> bytearray:
    assert memory is not None
    return memory


def test_credit_is_shared_but_never_below_one_chunk() -> None:
    budget = ReceiveBudget(1000 * KIB, 300 * KIB)
    assert budget.share(0) == budget.share(1) == 1000 * KIB
    assert budget.share(2) == 500 * KIB
    assert budget.share(10) == 300 * KIB


def test_lease_beyond_the_budget_is_none_and_asked_for_again_once_memory_came_free() -> None:
    budget = ReceiveBudget(100 * KIB, 60 * KIB)
    first = taken(budget.lease("a", 60 * KIB))
    asked: list[str] = []
    assert budget.lease("b", 60 * KIB, lambda: asked.append("b")) is None
    assert not asked
    budget.release("a", first)
    assert asked == ["b"]
    second = taken(budget.lease("b", 60 * KIB))
    budget.release("b", second)
    assert asked == ["b"], "once per request"
    assert budget.leased_bytes == 0


def test_another_share_is_reason_to_ask_again() -> None:
    budget = ReceiveBudget(100 * KIB, 10 * KIB)
    budget.share(2)
    for _ in range(5):
        taken(budget.lease("a", 10 * KIB))
    asked: list[str] = []
    assert budget.lease("a", 10 * KIB, lambda: asked.append("a")) is None
    budget.share(1)
    assert asked == ["a"]
    taken(budget.lease("a", 10 * KIB))


def test_stalled_sender_holds_no_more_than_its_share() -> None:
    budget = ReceiveBudget(100 * KIB, 10 * KIB)
    budget.share(2)
    for _ in range(5):
        taken(budget.lease("stalled", 10 * KIB))
    assert budget.lease("stalled", 10 * KIB) is None
    assert budget.lease("other", 10 * KIB) is not None


def test_connection_keeps_the_room_it_found_and_gives_it_back_when_it_ends() -> None:
    budget = ReceiveBudget(100 * KIB, 60 * KIB)
    scratch, other = Scratch(budget, "a", 5.0), Scratch(budget, "b", 5.0)
    assert scratch.has_room(10 * KIB, print, 0.0)
    assert scratch.has_room(60 * KIB, print, 0.0), "a larger one takes its place"
    assert budget.leased_bytes == 60 * KIB
    assert not other.has_room(60 * KIB, print, 0.0)
    scratch.close()
    assert budget.leased_bytes == 0
    assert other.has_room(60 * KIB, print, 1.0)
    memory = other.lease()
    other.close()
    assert budget.leased_bytes == 60 * KIB, "leased: its owner gives it back"
    other.release(memory)
    assert budget.leased_bytes == 0


def test_room_that_never_comes_ends_the_wait() -> None:
    budget = ReceiveBudget(100 * KIB, 60 * KIB)
    taken(budget.lease("a", 60 * KIB))
    scratch = Scratch(budget, "b", 5.0)
    assert not scratch.has_room(60 * KIB, print, 100.0)
    assert not scratch.has_room(60 * KIB, print, 104.9)
    with pytest.raises(TransportError) as caught:
        scratch.has_room(60 * KIB, print, 105.0)
    assert caught.value.reason == "receive_budget"


def test_single_chunk_larger_than_the_budget_still_gets_through_when_nothing_else_is_there() -> None:
    budget = ReceiveBudget(10 * KIB, 10 * KIB)
    memory = taken(budget.lease("a", 64 * KIB))
    budget.release("a", memory)
    assert budget.leased_bytes == 0


@settings(max_examples=200)
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
        memory = budget.lease(peer, nbytes)
        if memory is None:
            continue
        assert len(memory) >= nbytes
        assert all(memory is not other for _, other in held)
        held.append((peer, memory))
        assert budget.leased_bytes == sum(len(memory) for _, memory in held)
        assert budget.leased_bytes + budget._free_bytes <= 100 * KIB
    for owner, memory in held:
        budget.release(owner, memory)
    assert budget.leased_bytes == 0


def test_tiny_leases_cost_what_their_place_in_lists_costs() -> None:
    """Or a peer could fill the lists of a whole budget with single bytes, and everybody would search them."""
    budget = ReceiveBudget(64 * MIN_LEASE_BYTES, MIN_LEASE_BYTES)
    leases = []
    while (memory := budget.lease("a", 1)) is not None:
        leases.append(memory)
    assert len(leases) == 64
    for memory in leases:
        budget.release("a", memory)


def test_used_memory_is_kept_for_later_but_not_without_end() -> None:
    budget = ReceiveBudget(4096 * KIB, 64 * KIB)
    leases = [taken(budget.lease("a", 4 * KIB)) for _ in range(1000)]
    for memory in leases:
        budget.release("a", memory)
    again = [taken(budget.lease("a", 4 * KIB)) for _ in range(1000)]
    assert len({id(memory) for memory in again} & {id(memory) for memory in leases}) == MAX_FREE
    for memory in again:
        budget.release("a", memory)
    assert budget.leased_bytes == 0
