"""The registry's state machine: leases, revisions, restarts."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from farfill.core.cluster import Instance, InstanceState, Role
from farfill.registry.store import RegistryStore


def instance(name: str = "d1", generation: str = "g1", queued_tokens: int = 0) -> Instance:
    return Instance(
        name=name,
        role=Role.DECODE,
        site="near",
        url="https://127.0.0.1:1",
        transfer_address="127.0.0.1:2",
        model="tiny",
        fingerprint="f",
        generation=generation,
        state=InstanceState.READY,
        max_context_tokens=100,
        queued_tokens=queued_tokens,
    )


def test_lease_runs_out_unless_renewed():
    store = RegistryStore(5.0)
    store.put(instance("a"), 0.0)
    store.put(instance("b"), 0.0)
    store.put(instance("b"), 4.0)
    assert store.expire(4.9) == []
    assert [gone.name for gone in store.expire(5.0)] == ["a"]
    assert [live.name for live in store.instances()] == ["b"]


def test_renewal_without_change_keeps_the_revision():
    store = RegistryStore(5.0)
    assert store.put(instance(), 0.0) == "registered"
    revision = store.revision
    assert store.put(instance(), 1.0) == "renewed"
    assert store.revision == revision
    assert store.put(instance(queued_tokens=9), 2.0) == "renewed"
    assert store.revision == revision + 1


def test_restarted_worker_replaces_its_former_self_for_good():
    store = RegistryStore(5.0)
    store.put(instance(generation="old"), 0.0)
    assert store.put(instance(generation="new"), 1.0) == "registered"
    assert store.put(instance(generation="old"), 2.0) == "superseded"
    assert not store.remove("d1", "old")
    assert store.instances()[0].generation == "new"
    assert store.remove("d1", "new")
    assert store.instances() == ()


def test_many_restarts_keep_bounded_memory():
    store = RegistryStore(5.0)
    for i in range(1000):
        store.put(instance(generation=str(i)), float(i))
    assert store.put(instance(generation="998"), 1001.0) == "superseded"
    assert len(store._superseded["d1"]) <= 16


actions = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "expire"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["g1", "g2", "g3"]),
        st.floats(0, 3),
        st.integers(0, 1),
    ),
    max_size=30,
)


@given(actions)
def test_revision_moves_exactly_when_the_list_does(steps):
    store, now_s = RegistryStore(5.0), 0.0
    renewed_s: dict[str, float] = {}
    for action, name, generation, pause_s, load in steps:
        now_s += pause_s
        before, revision = store.instances(), store.revision
        if action == "put" and store.put(instance(name, generation, load), now_s) != "superseded":
            renewed_s[name] = now_s
        elif action == "remove":
            store.remove(name, generation)
        elif action == "expire":
            store.expire(now_s)
            assert all(now_s < renewed_s[live.name] + 5.0 for live in store.instances())
        assert (store.revision != revision) == (store.instances() != before)
        assert store.revision >= revision


def test_fields_survive_the_wire():
    from farfill.registry.messages import from_message, to_message

    original = dataclasses.replace(instance(), kv_used_bytes=7, kv_total_bytes=70, state=InstanceState.DRAINING)
    assert from_message(to_message(original)) == original
