from __future__ import annotations

from typing import Any

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.policy.offload import PrefillAvailability
from farfill.policy.pick import (
    DecodeCandidate,
    PrefillCandidate,
    pick_decode,
    pick_prefill,
    ready_decode,
    ready_prefill,
    usable_prefill,
)


def instance(name: str, role: Role = Role.DECODE, **more: Any) -> Instance:
    fields: dict[str, Any] = {
        "site": "near", "url": "", "transfer_address": "", "model": "m", "fingerprint": "f", "generation": "1",
        "state": InstanceState.READY, "max_context_tokens": 100, **more,
    }  # fmt: skip
    return Instance(name=name, role=role, **fields)


def decode(name: str, tokens: int = 0, requests: int = 0, hit: int = 0, **more: Any) -> DecodeCandidate:
    return DecodeCandidate(
        instance=instance(name, **more), outstanding_tokens=tokens, outstanding_requests=requests, hit_tokens=hit
    )


def prefill(name: str, tokens: int = 0, requests: int = 0, **more: Any) -> PrefillCandidate:
    return PrefillCandidate(
        instance=instance(name, Role.PREFILL, **more), outstanding_tokens=tokens, outstanding_requests=requests
    )


def name_of(candidate: DecodeCandidate | PrefillCandidate | None) -> str:
    assert candidate is not None
    return candidate.instance.name


def test_nothing_to_pick_from_is_none() -> None:
    assert pick_decode([], 10) is None
    assert pick_prefill([]) is None


def test_least_waiting_tokens_win_whoever_counted_them() -> None:
    assert name_of(pick_decode([decode("a", queued_tokens=10), decode("b", tokens=5)], 100)) == "b"
    assert name_of(pick_prefill([prefill("a", tokens=10), prefill("b", queued_tokens=5)])) == "b"


def test_tokens_known_to_both_are_not_counted_twice() -> None:
    assert name_of(pick_decode([decode("a", tokens=6, queued_tokens=6), decode("b", tokens=8)], 100)) == "a"


def test_prefix_hit_beats_a_little_load() -> None:
    assert name_of(pick_decode([decode("a"), decode("b", tokens=50, hit=64)], 100)) == "b"
    assert name_of(pick_decode([decode("a"), decode("b", tokens=80, hit=64)], 100)) == "a"


def test_ties_go_to_fewer_requests_then_to_the_name() -> None:
    assert name_of(pick_decode([decode("a", requests=2), decode("b", running_requests=1)], 10)) == "b"
    assert name_of(pick_decode([decode("b"), decode("a")], 10)) == "a"
    assert name_of(pick_prefill([prefill("b"), prefill("a")])) == "a"


def test_only_ready_instances_of_the_role_and_model_are_considered() -> None:
    d, p, mixed = instance("d"), instance("p", Role.PREFILL), instance("m", Role.MIXED)
    others = [instance("x", state=InstanceState.DRAINING), instance("y", model="other"), instance("z", Role.PREFILL)]
    assert ready_decode([d, p, mixed, *others], "m") == [d, mixed]
    assert ready_prefill([d, p, mixed], "m", d) == [p, mixed]
    assert ready_prefill([d, p, mixed], "m", mixed) == [p]


def test_what_stands_in_the_way_of_far_prefill() -> None:
    d, same = instance("d"), instance("p", Role.PREFILL)
    other = instance("q", Role.PREFILL, fingerprint="g")
    assert usable_prefill([], d, lambda _: True) == ([], PrefillAvailability.NONE_READY)
    assert usable_prefill([other], d, lambda _: True) == ([], PrefillAvailability.FINGERPRINT_MISMATCH)
    assert usable_prefill([other, same], d, lambda _: False) == ([], PrefillAvailability.BREAKER_OPEN)
    assert usable_prefill([other, same], d, lambda _: True) == ([same], PrefillAvailability.AVAILABLE)
