"""Admission and the fair queue."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.policy.admission import (
    Admission,
    AdmissionLimits,
    Arrival,
    Effect,
    Refusal,
    Refused,
    Started,
    TenantLimits,
    Waits,
)
from farfill.policy.fair_queue import FairQueue


def arrival(request: str, tenant: str = "t", tokens: int = 100, **changes) -> Arrival:
    return Arrival(request=request, tenant=tenant, kv_tokens=tokens, **({"deadline_s": 100.0} | changes))


def started(effects: list[Effect]) -> list[str]:
    return [e.request for e in effects if isinstance(e, Started)]


def test_runs_waits_and_starts_in_turn():
    admission = Admission(AdmissionLimits(max_running=1))
    assert admission.arrive(arrival("a"), 0) == [Started("a")]
    assert admission.arrive(arrival("b"), 0) == [Waits("b", 0.0)]
    assert admission.arrive(arrival("c"), 0) == [Waits("c", 0.0)]
    assert admission.end("a", 1) == [Started("b")]
    assert admission.cancel("c", 1) == []
    assert admission.end("b", 2) == []
    assert (admission.running, admission.waiting, admission.outstanding) == (0, 0, (0, 0))
    with pytest.raises(ValueError, match="arrived already"):
        admission.arrive(arrival("d"), 2) + admission.arrive(arrival("d"), 2)


def test_outstanding_kv_tokens_and_link_bytes_hold_requests_back():
    admission = Admission(AdmissionLimits(kv_tokens=1000, link_bytes=500))
    assert started(admission.arrive(arrival("a", tokens=600, link_bytes=400), 0)) == ["a"]
    assert not started(admission.arrive(arrival("b", tokens=100, link_bytes=200), 0))
    assert not started(admission.arrive(arrival("c", tokens=1), 0))  # nobody overtakes b
    assert started(admission.sent("a", 0)) == ["b", "c"]
    assert admission.sent("a", 0) == []
    assert admission.outstanding == (701, 200)
    assert not started(admission.arrive(arrival("d", tokens=400), 0))
    assert started(admission.end("a", 0)) == ["d"]
    (refused,) = admission.arrive(arrival("e", tokens=1001), 0)
    assert refused == Refused("e", Refusal.TOO_LARGE, 0.0)
    assert refused.reason.status == 400


def test_deadline_in_the_queue_is_kept():
    admission = Admission(AdmissionLimits(max_running=1))
    admission.arrive(arrival("a"), 0)
    admission.arrive(arrival("late", deadline_s=5), 0)
    admission.arrive(arrival("later", deadline_s=9), 0)
    assert admission.next_deadline_s() == 5
    (refused,) = admission.tick(5)
    assert isinstance(refused, Refused)
    assert (refused.request, refused.reason, refused.reason.status) == ("late", Refusal.DEADLINE, 503)
    assert refused.retry_after_s >= 1
    assert started(admission.end("a", 6)) == ["later"]
    assert admission.next_deadline_s() is None


def test_hopeless_request_is_shed_at_once():
    admission = Admission(AdmissionLimits(max_running=1))
    now_s = 0.0
    admission.arrive(arrival("r0", tokens=1000), now_s)
    for i in range(1, 12):
        admission.arrive(arrival(f"r{i}", tokens=1000, deadline_s=1e9), now_s)
        now_s += 1.0
        admission.end(f"r{i - 1}", now_s)
    for i in range(12, 22):
        admission.arrive(arrival(f"r{i}", tokens=1000, deadline_s=1e9), now_s)
    # 1000 tokens a second get done and 10,000 wait.
    (shed,) = admission.arrive(arrival("short", deadline_s=now_s + 5), now_s)
    assert isinstance(shed, Refused)
    assert (shed.reason, shed.reason.status) == (Refusal.SHED, 503)
    assert shed.retry_after_s == pytest.approx(10, rel=0.15)
    (waits,) = admission.arrive(arrival("patient", deadline_s=now_s + 50), now_s)
    assert isinstance(waits, Waits)
    assert waits.expected_s == pytest.approx(10, rel=0.15)


def test_burst_after_quiet_hours_is_not_taken_for_hopeless():
    """Little was asked for: that was not slowness. Four at a time get 1000 tokens a second each done."""
    admission = Admission(AdmissionLimits(max_running=4))
    now_s = 0.0
    for i in range(20):
        admission.arrive(arrival(f"quiet{i}", tokens=1000), now_s)
        admission.end(f"quiet{i}", now_s + 1.0)
        now_s += 3.0
    for i in range(4):
        admission.arrive(arrival(f"running{i}", tokens=1000, deadline_s=1e9), now_s)
    for i in range(40):
        (waits,) = admission.arrive(arrival(f"burst{i}", tokens=1000, deadline_s=now_s + 12), now_s)
        assert isinstance(waits, Waits)
        assert waits.expected_s == pytest.approx(i / 4)
    (_, *_) = [admission.arrive(arrival(f"more{i}", tokens=1000, deadline_s=now_s + 12), now_s) for i in range(9)]
    (shed,) = admission.arrive(arrival("last", tokens=1000, deadline_s=now_s + 12), now_s)
    assert isinstance(shed, Refused)
    assert shed.reason is Refusal.SHED


def test_requests_that_take_minutes_are_shed_as_well():
    """Long contexts, two at a time, 100 s each: what is known of them may be older than the window."""
    admission = Admission(AdmissionLimits(max_running=2))
    for i in range(12):
        admission.arrive(arrival(f"r{i}", tokens=100_000, deadline_s=1e9), 0.0)
    for i in range(10):
        admission.end(f"r{i}", 100.0 * (1 + i // 2))
    (shed,) = admission.arrive(arrival("no", tokens=10, deadline_s=500.0 + 30.0), 500.0)
    assert not isinstance(shed, Refused), "nobody waits before it"
    admission.arrive(arrival("far", tokens=100_000, deadline_s=1e9), 500.0)
    (shed,) = admission.arrive(arrival("late", tokens=10, deadline_s=500.0 + 30.0), 500.0)
    assert isinstance(shed, Refused)
    assert (shed.reason, shed.retry_after_s) == (Refusal.SHED, pytest.approx(50, rel=0.01))


def test_limit_lowered_below_what_waits_holds_up_nobody():
    admission = Admission(AdmissionLimits(kv_tokens=1000))
    admission.arrive(arrival("runs", tokens=900), 0)
    admission.arrive(arrival("large", tokens=800), 0)
    admission.arrive(arrival("small", tokens=50), 0)
    admission.configure(AdmissionLimits(kv_tokens=100), {})
    assert started(admission.tick(0)) == []
    assert started(admission.end("runs", 1)) == ["large"], "alone"
    assert started(admission.end("large", 2)) == ["small"]


def test_queues_are_bounded_in_all_and_for_each_tenant():
    admission = Admission(AdmissionLimits(max_running=0, max_waiting=3, max_waiting_per_tenant=2))
    reasons = []
    for i, tenant in enumerate("aaabb"):
        for effect in admission.arrive(arrival(str(i), tenant), 0):
            reasons.append(effect.reason if isinstance(effect, Refused) else None)
    assert reasons == [None, None, Refusal.TENANT_QUEUE, None, Refusal.QUEUE]
    assert Refusal.QUEUE.status == 429


def test_rate_limits_are_each_tenants_own_and_say_when():
    tenants = {"t": TenantLimits(requests_per_s=1, tokens_per_s=1000, burst_s=2), "*": TenantLimits(requests_per_s=5)}
    admission = Admission(AdmissionLimits(), tenants)
    assert started(admission.arrive(arrival("1", tokens=1500), 0)) == ["1"]
    (refused,) = admission.arrive(arrival("2", tokens=1500), 0)
    assert refused == Refused("2", Refusal.TENANT_TOKENS, 1.0)
    assert started(admission.arrive(arrival("3", tokens=100), 0)) == ["3"]
    assert admission.arrive(arrival("4", tokens=100), 0) == [Refused("4", Refusal.TENANT_REQUESTS, 1.0)]
    assert started(admission.arrive(arrival("5", "other", tokens=10**9), 0)) == ["5"]
    admission.end("1", 0, used_tokens=500)
    assert started(admission.arrive(arrival("6", tokens=1500), 1.0)) == ["6"]  # 400 left, 1000 back, 1000 new: full


def test_what_never_ran_is_not_charged():
    admission = Admission(AdmissionLimits(max_running=1), {"t": TenantLimits(tokens_per_s=100, burst_s=10)})
    admission.arrive(arrival("a", "other"), 0)
    admission.arrive(arrival("b", tokens=1000), 0)
    admission.cancel("b", 0)
    assert isinstance(admission.arrive(arrival("c", tokens=1000, deadline_s=1), 0)[0], Waits)
    assert isinstance(admission.tick(1)[0], Refused)
    assert isinstance(admission.arrive(arrival("d", tokens=1000), 1)[0], Waits)


def test_limits_change_while_running_and_keep_what_was_used():
    tenants = {"t": TenantLimits(requests_per_s=1, burst_s=1), "u": TenantLimits(requests_per_s=1, burst_s=1)}
    admission = Admission(AdmissionLimits(max_running=1), tenants)
    admission.arrive(arrival("1"), 0)
    admission.arrive(arrival("2", "u"), 0)
    admission.configure(AdmissionLimits(max_running=5), {**tenants, "u": TenantLimits(requests_per_s=9, burst_s=1)})
    assert started(admission.tick(0)) == ["2"]
    assert isinstance(admission.arrive(arrival("3"), 0)[0], Refused)
    assert started(admission.arrive(arrival("4", "u"), 0)) == ["4"]


def test_many_unlimited_tenants_leave_nothing_behind():
    admission = Admission(AdmissionLimits())
    for i in range(1000):
        admission.arrive(arrival(str(i), f"tenant-{i}"), 0)
        admission.end(str(i), 0)
    assert not admission._tenants


happenings = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "end", "cancel", "tick", "sent"]),
        st.sampled_from("abc"),
        st.integers(1, 400),
        st.integers(0, 300),
        st.integers(0, 2),
        st.floats(0, 3),
        st.floats(0, 10),
        st.integers(0, 30),
    ),
    max_size=80,
)


@given(happenings)
def test_any_history_keeps_every_bound_and_answers_every_request_once(happened):
    limits = AdmissionLimits(max_running=4, max_waiting=6, max_waiting_per_tenant=4, kv_tokens=900, link_bytes=500)
    admission = Admission(limits, {"a": TenantLimits(requests_per_s=2, tokens_per_s=500), "b": TenantLimits(weight=3)})
    now_s, number = 0.0, 0
    state: dict[str, str] = {}
    answers: Counter[str] = Counter()

    def take(effects: list[Effect]) -> None:
        for effect in effects:
            before = state[effect.request]
            if isinstance(effect, Waits):
                assert before == "new"
                state[effect.request] = "waiting"
                continue
            assert before in ("new", "waiting"), "each request is answered once"
            answers[effect.request] += 1
            state[effect.request] = "running" if isinstance(effect, Started) else "refused"

    for what, tenant, tokens, link, priority, pause_s, patience_s, pick in happened:
        now_s += pause_s
        if what == "arrive":
            number += 1
            state[str(number)] = "new"
            take(
                admission.arrive(
                    Arrival(
                        request=str(number),
                        tenant=tenant,
                        kv_tokens=tokens,
                        link_bytes=link,
                        priority=priority,
                        deadline_s=now_s + patience_s,
                    ),
                    now_s,
                )
            )
            assert state[str(number)] != "new"
        elif what == "tick":
            take(admission.tick(now_s))
        else:
            wanted = "waiting" if what == "cancel" else "running"
            those = [r for r, s in state.items() if s == wanted]
            if not those:
                continue
            request = those[pick % len(those)]
            if what == "sent":
                take(admission.sent(request, now_s))
            else:
                state[request] = "ended"
                take(admission.end(request, now_s) if what == "end" else admission.cancel(request, now_s))
        running = sum(s == "running" for s in state.values())
        assert admission.running == running <= 4
        assert admission.waiting == sum(s == "waiting" for s in state.values()) <= 6
        assert admission.outstanding[0] <= 900
        assert 0 <= admission.outstanding[1] <= 500
    for _ in range(100):
        for request in [r for r, s in state.items() if s == "running"]:
            state[request] = "ended"
            take(admission.end(request, now_s))
    assert admission.waiting == 0, "what waits starts once others end"
    assert admission.outstanding == (0, 0)
    assert all(count == 1 for count in answers.values())


def test_busy_tenants_share_by_weight_whatever_their_number_of_requests():
    queue: FairQueue[str] = FairQueue()
    for i in range(3000):
        queue.push(f"greedy-{i}", tenant="greedy", cost=100)
    for i in range(300):
        queue.push(f"small-{i}", tenant="small", cost=100)
        queue.push(f"heavy-{i}", tenant="heavy", cost=100, weight=2)
    first = Counter(str(queue.pop()).split("-")[0] for _ in range(400))
    assert first["heavy"] == pytest.approx(200, abs=3)
    assert first["small"] == pytest.approx(100, abs=3)
    assert first["greedy"] == pytest.approx(100, abs=3)


def test_share_is_of_cost_not_of_requests():
    queue: FairQueue[int] = FairQueue()
    for i in range(100):
        queue.push(i, tenant="long", cost=1000)
        queue.push(1000 + i, tenant="short", cost=100)
    popped = [queue.pop() for _ in range(55)]
    assert sum(1 for item in popped if item is not None and item < 1000) == pytest.approx(5, abs=1)


def test_who_was_away_does_not_save_up_turns():
    queue: FairQueue[str] = FairQueue()
    for i in range(100):
        queue.push(f"a{i}", tenant="a", cost=1)
    for _ in range(50):
        queue.pop()
    for i in range(100):
        queue.push(f"b{i}", tenant="b", cost=1)
    turns = "".join(str(queue.pop())[0] for _ in range(40))
    assert turns.count("b") == pytest.approx(20, abs=1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100), st.integers(0, 2), st.booleans()), max_size=60))
def test_queue_gives_everything_back_once_by_priority_and_in_each_tenants_order(pushed):
    queue: FairQueue[int] = FairQueue()
    kept: list[tuple[int, str, int]] = []
    for number, (tenant, cost, priority, removed) in enumerate(pushed):
        queue.push(number, tenant=tenant, cost=cost, priority=priority)
        if removed:
            assert queue.remove(number)
            assert not queue.remove(number)
        else:
            kept.append((number, tenant, priority))
    assert len(queue) == len(kept)
    popped = []
    while (item := queue.pop()) is not None:
        popped.append(item)
    assert sorted(popped) == sorted(number for number, _, _ in kept)
    by_number = {number: (tenant, priority) for number, tenant, priority in kept}
    priorities = [by_number[item][1] for item in popped]
    assert priorities == sorted(priorities, reverse=True)
    for group in {(t, p) for _, t, p in kept}:
        own = [item for item in popped if by_number[item] == group]
        assert own == sorted(own)
    assert queue.waiting_of("a") == 0
    assert not queue._finish


def test_queue_refuses_nonsense():
    queue: FairQueue[str] = FairQueue()
    queue.push("a", tenant="t", cost=1)
    with pytest.raises(ValueError, match="waits already"):
        queue.push("a", tenant="t", cost=1)
    with pytest.raises(ValueError, match="weight"):
        queue.push("b", tenant="t", cost=1, weight=0)
    assert queue.pop(lambda _: False) is None
    assert len(queue) == 1
