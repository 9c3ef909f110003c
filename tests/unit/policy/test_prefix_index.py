"""The block index against a plain dictionary of sets, its bounds, trust, and tenants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.kv.hashing import prefix_keys
from farfill.policy.prefix import BlockIndex

NAMES = [f"d{i}" for i in range(5)]


def keys(text: str, count: int) -> list[bytes]:
    """Keys of one prompt; prompts that share a beginning share keys."""
    return [f"{text[: i + 1]}|{i}".encode() for i in range(count)]


prompts = st.text("ab", min_size=1, max_size=40).map(lambda text: keys(text, len(text)))
events = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "trim", "clear", "leave", "restart"]),
        st.sampled_from(NAMES),
        prompts,
        st.integers(0, 40),
    ),
    max_size=40,
)


@given(events, st.lists(prompts, max_size=5))
def test_exact_holders_that_evict_ends_first_are_known_exactly(happened, asked):
    index = BlockIndex(100_000)
    model: dict[str, set[bytes]] = {name: set() for name in NAMES}
    generation = dict.fromkeys(NAMES, 0)
    for name in NAMES:
        index.join(name, f"site-{name[-1]}", "0", exact=True)
    for kind, name, prompt, number in happened:
        if kind == "store":
            index.stored(name, prompt)
            model[name].update(prompt)
        elif kind == "trim":
            # All blocks of depth `number` and deeper go: what is left is closed under prefixes.
            gone = {key for key in model[name] if int(key.split(b"|")[1]) >= number}
            index.removed(name, sorted(gone))
            model[name] -= gone
        elif kind == "clear":
            index.cleared(name)
            model[name].clear()
        else:
            generation[name] += 1
            if kind == "leave":
                index.leave(name)
            index.join(name, f"site-{name[-1]}", str(generation[name]), exact=True)
            model[name].clear()
    for prompt in [p for _, _, p, _ in happened] + asked:
        hits = index.hits(prompt)
        naive = {
            name: next((i for i, k in enumerate(prompt) if k not in held), len(prompt)) for name, held in model.items()
        }
        assert {name: hits.at(name) for name in NAMES} == naive
        assert {name: hits.at_site(f"site-{name[-1]}") for name in NAMES} == naive
        assert hits.best == max(naive.values())


@given(st.integers(0, 2**32))
def test_holes_never_make_the_answer_too_low(seed: int):
    rng = random.Random(seed)
    index = BlockIndex(100_000)
    index.join("d", "s", "0", exact=True)
    prompt = keys("a" * 200, 200)
    held = {key for key in prompt if rng.random() < 0.97}
    index.stored("d", [key for key in prompt if key in held])
    leading = next((i for i, key in enumerate(prompt) if key not in held), len(prompt))
    assert leading <= index.hits(prompt).at("d") <= len(prompt)


def test_sparse_holders_hit_only_where_they_can_go_on():
    index = BlockIndex(1000)
    index.join("hybrid", "near", "0", exact=True, sparse=True)
    index.join("dense", "near", "0", exact=True)
    prompt = keys("a" * 10, 10)
    index.stored("hybrid", [prompt[3], prompt[7]])
    index.stored("dense", prompt[:5])
    assert index.hits(prompt).blocks == {"hybrid": 8, "dense": 5}
    assert index.hits(prompt[:7]).blocks == {"hybrid": 4, "dense": 5}
    assert index.hits(prompt[:3]).at("hybrid") == 0
    assert index.hits(prompt).at_site("near") == 8
    assert index.hits([]).best == 0


def test_history_is_believed_until_reports_disagree():
    index = BlockIndex(1000)
    index.join("d", "near", "0")
    prompt = keys("abcdef", 6)
    assert index.placed("d", prompt, 0) == 0
    assert index.hits(prompt).at("d") == 6
    assert index.placed("d", prompt, 4) == -2
    assert index.hits(prompt).at("d") == 0  # not believed
    assert index.placed("d", prompt, 6) == 0
    assert index.hits(prompt).at("d") == 6
    assert index.placed("unknown", prompt, 6) is None


def test_exact_holders_are_not_written_by_history():
    index = BlockIndex(1000)
    index.join("d", "near", "0", exact=True)
    prompt = keys("abc", 3)
    assert index.placed("d", prompt, 2) == 2
    assert index.hits(prompt).at("d") == 0
    index.stored("d", prompt)
    assert index.placed("d", prompt, 2) == -1
    assert index.hits(prompt).at("d") == 3
    index.join("h", "near", "0")
    index.stored("h", prompt)
    assert index.hits(prompt).at("h") == 0


def test_same_prompt_of_two_tenants_never_meets():
    index = BlockIndex(1000)
    index.join("d", "near", "0", exact=True)
    tokens = list(range(64))
    index.stored("d", prefix_keys(tokens, 16, "tenant-a"))
    assert index.hits(prefix_keys(tokens, 16, "tenant-a")).at("d") == 4
    assert index.hits(prefix_keys(tokens, 16, "tenant-b")).at("d") == 0


def test_bound_holds_and_what_is_used_stays():
    index = BlockIndex(1000)
    index.join("d", "near", "0")
    hot = keys("h" * 20, 20)
    for i in range(500):
        index.placed("d", hot, None)
        index.placed("d", [f"{i}-{k}".encode() for k in range(20)], None)
        assert len(index) <= 1000
    assert index.hits(hot).at("d") == 20
    assert index.forgotten > 8000


def test_prompt_longer_than_the_bound_keeps_its_beginning():
    index = BlockIndex(100)
    index.join("d", "near", "0")
    prompt = [b"%d" % i for i in range(500)]
    index.placed("d", prompt, None)
    assert 0 < index.hits(prompt).at("d") <= 50


def test_bits_of_the_gone_are_used_again_and_mean_nothing_old():
    index = BlockIndex(200)
    prompt = keys("abc", 3)
    for i in range(1000):
        index.join("d", "near", str(i))
        assert index.hits(prompt).at("d") == 0
        index.placed("d", prompt, None)
        assert index.hits(prompt).at("d") == 3
    assert index._next_bit < 300


def test_retain_keeps_only_the_living():
    index = BlockIndex(100)
    for name in NAMES:
        index.join(name, "near", "0", exact=True)
        index.stored(name, [b"k"])
    index.retain(["d1", "d3"])
    assert set(index.hits([b"k"]).blocks) == {"d1", "d3"}


def test_nonsense_bound_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        BlockIndex(1)
