"""Prefix keys: chained, salted, one per whole chunk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farfill.kv.hashing import KEY_BYTES, prefix_keys

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(1, 9))
def test_whole_chunks_have_one_key_each(ids: list[int], chunk: int) -> None:
    keys = prefix_keys(ids, chunk, "tenant")
    assert len(keys) == len(ids) // chunk
    assert len(set(keys)) == len(keys)
    assert all(len(key) == KEY_BYTES for key in keys)


@given(tokens, tokens, st.integers(1, 5))
def test_keys_agree_exactly_as_far_as_the_prefix_does(a: list[int], b: list[int], chunk: int) -> None:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    keys_a, keys_b = prefix_keys(a, chunk, "t"), prefix_keys(b, chunk, "t")
    for i, (x, y) in enumerate(zip(keys_a, keys_b, strict=False)):
        assert (x == y) == ((i + 1) * chunk <= shared)


def test_salt_separates_tenants() -> None:
    assert set(prefix_keys(range(64), 8, "a")).isdisjoint(prefix_keys(range(64), 8, "b"))


def test_chunk_size_is_part_of_what_a_key_names() -> None:
    assert set(prefix_keys(range(64), 8, "a")).isdisjoint(prefix_keys(range(64), 4, "a")[::3])


def test_chunk_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        prefix_keys([1], 0, "a")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=40), st.integers(0, 11), st.binary(max_size=20))
def test_what_stands_behind_a_token_changes_its_chunk_and_later_ones(tokens: list[int], at: int, digest: bytes) -> None:
    plain, marked = prefix_keys(tokens, 4, "s"), prefix_keys(tokens, 4, "s", ((at, digest),))
    assert plain[: at // 4] == marked[: at // 4]
    assert not set(plain[at // 4 :]) & set(marked[at // 4 :])
    other = prefix_keys(tokens, 4, "s", ((at, digest + b"x"),))
    assert not set(other[at // 4 :]) & set(marked[at // 4 :])
