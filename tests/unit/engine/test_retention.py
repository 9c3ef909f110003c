"""What goes first when room is short, what stays pinned, and what goes with age."""

from __future__ import annotations

import pytest

from farfill.clock import VirtualClock
from farfill.engine.fake import FakeExecutor, FakeKV, fake_layout
from farfill.engine.prefix import PrefixCache
from farfill.engine.retention import Keep, Retention, chunk_cost

CHUNK = 4
ROWS = 4 * CHUNK * 16
"""Bytes of one chunk's rows."""
STATES = 2 * 16
"""Bytes of the two states."""


def cache_of(
    chunks: int, *, states: bool = False, ttl_s: float = 0.0, clock: VirtualClock | None = None
) -> PrefixCache:
    limit = chunks * (ROWS + (STATES if states else 0))
    return PrefixCache(fake_layout(CHUNK, states=states), limit, ttl_s=ttl_s, clock=clock)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 256 for i in range(length)]


def insert(cache: PrefixCache, prompt: list[int]) -> tuple[bytes, ...]:
    keys = cache.keys(prompt, "")
    executor = FakeExecutor(cache.layout)
    kv: FakeKV = executor.allocate(len(prompt))
    for chunk in range(len(keys)):
        executor.prefill(kv, prompt[chunk * CHUNK : (chunk + 1) * CHUNK])
        cache.insert(keys, chunk, kv)
    return keys


def hit_tokens(cache: PrefixCache, keys: tuple[bytes, ...]) -> int:
    hit = cache.find(keys)
    if hit is None:
        return 0
    hit.release()
    return hit.tokens


def test_costly_part_outlives_cheap_ones_used_later_but_not_for_ever() -> None:
    retention = Retention(1000, 0.0)
    costly = retention.add(b"costly", 10, 100.0)
    retention.touch(costly, 0.0)
    survived = 0
    while True:
        cheap = retention.add(b"cheap", 10, 20.0)
        retention.touch(cheap, 0.0)
        victim = retention.cheapest(lambda part: True)
        assert victim is not None
        retention.remove(victim)
        if victim is costly:
            break
        survived += 1
    # Five times the cost per byte: about five generations of what is dropped.
    assert survived == 4


def test_deeper_chunks_cost_more() -> None:
    costs = [chunk_cost(512, chunk) for chunk in range(40)]
    assert costs == sorted(costs)
    assert costs[-1] > 2 * costs[0]


def test_unused_chain_is_dropped_end_first() -> None:
    cache = cache_of(4)
    old = insert(cache, prompt_of(4 * CHUNK + 1, 1))
    lengths = []
    for seed in range(2, 12):
        insert(cache, prompt_of(CHUNK + 1, seed))
        with_old = [cache.find(old[:n]) for n in range(1, 5)]
        lengths.append(max((hit.tokens // CHUNK for hit in with_old if hit), default=0))
        for hit in with_old:
            if hit:
                hit.release()
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 3


def test_states_between_are_dropped_before_rows() -> None:
    cache = cache_of(4, states=True)
    keys = insert(cache, prompt_of(4 * CHUNK + 1, 1))
    assert hit_tokens(cache, keys) == 4 * CHUNK
    extra = cache.keys(prompt_of(2, 5), "")
    assert extra == ()
    insert(cache, prompt_of(CHUNK + 1, 2))
    cache.check_integrity()
    assert hit_tokens(cache, keys) < 4 * CHUNK or hit_tokens(cache, keys[:3]) < 3 * CHUNK
    assert cache.evicted[0] > 0


def test_pinned_prefix_stays_and_others_share_the_rest() -> None:
    cache = cache_of(4)
    pinned = cache.keys(prompt_of(2 * CHUNK + 1, 1), "")
    cache.keep(pinned, Keep(pinned=True))
    insert(cache, prompt_of(2 * CHUNK + 1, 1))
    for seed in range(2, 40):
        insert(cache, prompt_of(3 * CHUNK + 1, seed))
        cache.check_integrity()
    assert hit_tokens(cache, pinned) == 2 * CHUNK
    cache.keep(pinned, Keep())
    for seed in range(40, 80):
        insert(cache, prompt_of(4 * CHUNK + 1, seed))
    assert hit_tokens(cache, pinned) == 0


def test_pins_leave_half_of_the_room() -> None:
    cache = cache_of(4)
    keys = insert(cache, prompt_of(4 * CHUNK + 1, 1))
    cache.keep(keys, Keep(pinned=True))
    assert 0 < cache.pinned_bytes <= cache.limit_bytes // 2
    assert cache.pins_refused == 2
    assert hit_tokens(cache, insert(cache, prompt_of(2 * CHUNK + 1, 2))) == 2 * CHUNK


def test_an_order_ends_with_its_time() -> None:
    clock = VirtualClock()
    cache = cache_of(4, clock=clock)
    keys = insert(cache, prompt_of(2 * CHUNK + 1, 1))
    assert cache.keep(keys, Keep(pinned=True, until_s=50.0)) == 2
    pinned = cache.pinned_bytes
    assert pinned == cache.used_bytes
    clock.advance(49.0)
    assert cache.expire() == pytest.approx(1.0)
    assert cache.pinned_bytes == pinned
    clock.advance(1.0)
    assert cache.expire() is None
    assert cache.pinned_bytes == 0
    assert hit_tokens(cache, keys) == 2 * CHUNK, "it is still there, until others need the room"


def test_what_several_orders_pin_goes_with_the_last_of_them() -> None:
    cache = cache_of(8)
    keys = insert(cache, prompt_of(3 * CHUNK + 1, 1))
    cache.keep(keys, Keep(pinned=True))
    cache.keep(keys[:2], Keep(pinned=True))
    whole = cache.pinned_bytes
    cache.keep(keys, Keep())
    assert cache.pinned_bytes == whole // 3 * 2
    cache.keep(keys[:2], Keep())
    assert cache.pinned_bytes == 0


def test_states_are_pinned_only_where_a_prefix_ends() -> None:
    cache = cache_of(8, states=True)
    keys = insert(cache, prompt_of(3 * CHUNK + 1, 1))
    used = cache.used_bytes
    cache.keep(keys[:2], Keep(pinned=True))
    rows_and_states = cache.pinned_bytes
    cache.keep(keys[:2], Keep())
    cache.keep(keys[:1], Keep(pinned=True))
    one = cache.pinned_bytes
    rows = rows_and_states - one
    assert 0 < rows < one
    assert rows_and_states == 2 * rows + (one - rows)
    assert used == 3 * one


def test_weight_makes_a_prefix_outlive_equals_used_later() -> None:
    cache = cache_of(3)
    heavy, light = prompt_of(CHUNK + 1, 1), prompt_of(CHUNK + 1, 2)
    cache.keep(cache.keys(heavy, ""), Keep(weight=10.0))
    insert(cache, heavy)
    insert(cache, light)
    insert(cache, prompt_of(2 * CHUNK + 1, 3))
    assert hit_tokens(cache, cache.keys(heavy, "")) == CHUNK
    assert hit_tokens(cache, cache.keys(light, "")) == 0


def test_unused_snapshots_go_with_age() -> None:
    clock = VirtualClock()
    cache = cache_of(8, ttl_s=100.0, clock=clock)
    old, kept = insert(cache, prompt_of(2 * CHUNK + 1, 1)), insert(cache, prompt_of(2 * CHUNK + 1, 2))
    assert cache.expire() == pytest.approx(100.0)
    clock.advance(60.0)
    assert hit_tokens(cache, kept) == 2 * CHUNK
    clock.advance(41.0)
    assert cache.expire() == pytest.approx(59.0)
    assert hit_tokens(cache, old) == 0
    assert hit_tokens(cache, kept) == 2 * CHUNK
    assert cache.evicted == (0, 2)
    clock.advance(200.0)
    assert cache.expire() is None
    assert cache.used_bytes == 0
    cache.check_integrity()


def test_images_and_adapters_have_keys_of_their_own() -> None:
    cache, prompt = cache_of(1), prompt_of(3 * CHUNK + 1)
    plain = cache.keys(prompt, "t")
    one, other = cache.keys(prompt, "t", media=((5, b"one"),)), cache.keys(prompt, "t", media=((5, b"other"),))
    assert plain[0] == one[0] == other[0]
    assert len({plain[1], one[1], other[1]}) == len({plain[2], one[2], other[2]}) == 3
    assert not set(plain) & set(cache.keys(prompt, "t", adapter="lora"))
