"""Fair turns by bytes, whatever the size of chunks."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from farfill.transfer.turns import Turns


def serve(turns: Turns[str], sizes: dict[str, int], rounds: int) -> Counter[str]:
    given_bytes: Counter[str] = Counter()
    for _ in range(rounds):
        who = turns.order(sizes)[0]
        turns.charge(who, sizes[who])
        given_bytes[who] += sizes[who]
    return given_bytes


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 64), min_size=2))
def test_everybody_gets_equal_bytes_within_a_chunk_of_each(sizes: dict[str, int]) -> None:
    given_bytes = serve(Turns(), sizes, 600)
    for (one, chunk), (other, other_chunk) in itertools.permutations(sizes.items(), 2):
        assert given_bytes[one] - given_bytes[other] <= chunk + other_chunk


def test_large_chunks_do_not_push_small_ones_aside() -> None:
    given_bytes = serve(Turns(), {"large": 1000, "small": 10}, 1000)
    assert given_bytes["small"] >= given_bytes["large"] - 1000


def test_newcomer_and_sleeper_start_from_now() -> None:
    turns: Turns[str] = Turns()
    serve(turns, {"old": 10}, 100)
    assert abs(serve(turns, {"old": 10, "new": 10}, 10)["new"] - 50) <= 10
    serve(turns, {"old": 10}, 100)
    assert abs(serve(turns, {"old": 10, "new": 10}, 10)["new"] - 50) <= 10, "sleeping earned nothing"


def test_charge_is_corrected_when_the_chunk_was_smaller() -> None:
    turns: Turns[str] = Turns()
    turns.charge("a", 100)
    turns.charge("b", 50)
    turns.charge("a", -90)
    assert turns.order(["b", "a"]) == ["a", "b"]
