"""Whose turn it is: priority, tenants, age; and that nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farfill.core.sampling import SamplingParams
from farfill.engine.fake import FakeEngine
from farfill.engine.jobs import Demand, GenerateJob
from farfill.engine.protocol import GenerateWork, PrefillStats, TokenEvent
from farfill.engine.queue import WaitingQueue

VOCABULARY = FakeEngine().vocabulary


class Deaf:
    def prefilled(self, stats: PrefillStats) -> None: ...
    def token(self, event: TokenEvent) -> None: ...
    def failed(self, error: Exception) -> None: ...


def job(tenant: str = "", priority: int = 0, tokens: int = 10) -> GenerateJob:
    work = GenerateWork(
        request_id="r", prompt=(1, 2), cache_salt="", sampling=SamplingParams(), tenant=tenant, priority=priority
    )
    demand = Demand(1, tokens, tokens, lambda tokens: tokens)
    return GenerateJob(work, Deaf(), vocabulary=VOCABULARY, keys=(), demand=demand, wake=lambda: None)


def drain(queue: WaitingQueue) -> list[GenerateJob]:
    order = []
    while len(queue):
        following = queue.in_order()[0]
        queue.start(following)
        order.append(following)
    return order


def test_lower_priority_numbers_first_then_age() -> None:
    queue = WaitingQueue()
    jobs = [job(priority=priority) for priority in (0, 5, -1, 0)]
    for each in jobs:
        queue.add(each)
    assert drain(queue) == [jobs[2], jobs[0], jobs[3], jobs[1]]


def test_tenants_take_turns_by_what_they_had() -> None:
    queue = WaitingQueue()
    greedy = [job("a", tokens=10) for _ in range(4)]
    modest = [job("b", tokens=10) for _ in range(2)]
    for each in (*greedy, *modest):
        queue.add(each)
    # One pass over the order and one job at a time must agree.
    order = list(queue.in_order())
    assert drain(queue) == order
    assert [each.tenant for each in order] == ["a", "b", "a", "b", "a", "a"]


def test_tenant_that_comes_late_starts_level_and_gets_no_arrears() -> None:
    queue = WaitingQueue()
    for _ in range(6):
        queue.add(job("a"))
    for _ in range(3):
        queue.start(queue.in_order()[0])
    for _ in range(3):
        queue.add(job("b"))
    tenants = [each.tenant for each in drain(queue)]
    assert tenants[:4] in (["b", "a", "b", "a"], ["a", "b", "a", "b"], ["b", "a", "a", "b"])


def test_oldest_of_low_priority_starts_among_urgent_ones() -> None:
    queue = WaitingQueue()
    low = job(priority=50)
    queue.add(low)
    started = 0
    while low in queue:
        queue.add(job(priority=-50))
        queue.start(queue.in_order()[0])
        started += 1
        assert started <= 8


def test_job_set_back_keeps_its_place_and_is_not_charged_twice() -> None:
    queue = WaitingQueue()
    first, second = job("a"), job("a")
    queue.add(first)
    queue.add(second)
    queue.start(first)
    queue.add(first)
    assert queue.in_order() == [first, second]
    queue.start(first)
    queue.add(job("b"))
    assert queue.in_order()[0].tenant in ("a", "b")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, 50)), max_size=40))
def test_every_job_starts_once_and_more_urgent_ones_first_but_for_fair_starts(
    described: list[tuple[str, int, int]],
) -> None:
    queue = WaitingQueue()
    jobs = [job(*each) for each in described]
    for each in jobs:
        queue.add(each)
    order = drain(queue)
    assert sorted(map(id, order)) == sorted(map(id, jobs))
    regular = [each for number, each in enumerate(order, 1) if number % 8]
    assert [each.priority for each in regular] == sorted(each.priority for each in regular)
