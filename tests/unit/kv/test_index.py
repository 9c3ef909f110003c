from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from farfill.kv.index import PrefixIndex


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_leading_blocks_hit_at_the_instance_that_has_them() -> None:
    index = PrefixIndex(10)
    index.record("d1", "g", keys("a", "b", "c"), 0)
    assert index.hit_blocks("d1", "g", keys("a", "b", "c", "d")) == 3
    assert index.hit_blocks("d1", "g", keys("a", "x", "c")) == 1
    assert index.hit_blocks("d2", "g", keys("a")) == 0


def test_new_generation_starts_empty() -> None:
    index = PrefixIndex(10)
    index.record("d1", "g1", keys("a"), 0)
    assert index.hit_blocks("d1", "g2", keys("a")) == 0
    index.record("d1", "g2", keys("b"), 0)
    assert index.hit_blocks("d1", "g2", keys("a")) == 0
    assert len(index) == 1


def test_least_recently_used_go_first_and_shared_prefixes_last() -> None:
    index = PrefixIndex(4)
    index.record("d", "g", keys("p", "a"), 0)
    index.record("d", "g", keys("p", "b"), 1)
    index.record("d", "g", keys("p", "c"), 1)
    index.record("d", "g", keys("p", "d"), 1)
    assert index.hit_blocks("d", "g", keys("p", "a")) == 1
    assert index.hit_blocks("d", "g", keys("p", "b")) == 2
    assert len(index) == 4


def test_instance_that_holds_less_than_believed_is_not_believed_until_it_agrees_again() -> None:
    index = PrefixIndex(10)
    index.record("d", "g", keys("a", "b"), 0)
    index.record("d", "g", keys("a", "b"), 0)
    assert index.hit_blocks("d", "g", keys("a", "b")) == 0
    index.record("d", "g", keys("a", "b"), 2)
    assert index.hit_blocks("d", "g", keys("a", "b")) == 2


def test_report_about_something_else_changes_no_trust() -> None:
    index = PrefixIndex(10)
    index.record("d", "g", keys("a", "b"), 0)
    index.record("d", "g", keys("a", "b"), None)
    assert index.hit_blocks("d", "g", keys("a", "b")) == 2


def test_gone_instances_are_forgotten() -> None:
    index = PrefixIndex(10)
    index.record("d1", "g", keys("a"), 0)
    index.record("d2", "g", keys("a"), 0)
    index.retain([("d1", "g"), ("d2", "h")])
    assert index.hit_blocks("d1", "g", keys("a")) == 1
    assert len(index) == 1


def test_index_of_no_size_believes_nothing() -> None:
    index = PrefixIndex(0)
    index.record("d", "g", keys("a", "b"), 0)
    assert index.hit_blocks("d", "g", keys("a", "b")) == 0


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), max_size=30), st.integers(0, 5))
def test_bounded_and_hits_are_prefixes_of_what_was_recorded(prompts: list[list[str]], size: int) -> None:
    index = PrefixIndex(size)
    seen: set[bytes] = set()
    for prompt in prompts:
        chained = [("".join(prompt[: i + 1])).encode() for i in range(len(prompt))]
        hit = index.hit_blocks("d", "g", chained)
        assert set(chained[:hit]) <= seen
        index.record("d", "g", chained, hit)
        seen.update(chained)
        assert len(index) <= size
