"""Prefix snapshots: chains, limits, eviction order, pins, windows."""

from __future__ import annotations

import pytest

from farfill.core.layout import KVLayout
from farfill.engine.fake import FakeExecutor, FakeKV, fake_layout
from farfill.engine.prefix import PrefixCache, PrefixHit
from farfill.kv.hashing import prefix_keys

CHUNK = 4
FULL = fake_layout(CHUNK)
WINDOWED = fake_layout(CHUNK, window_tokens=3)
STATEFUL = fake_layout(CHUNK, window_tokens=3, states=True)
CHUNK_BYTES = 4 * CHUNK * 16


def filled(layout: KVLayout, prompt: list[int], tokens: int | None = None) -> FakeKV:
    executor = FakeExecutor(layout)
    kv = executor.allocate(len(prompt) + 4)
    executor.prefill(kv, prompt[: len(prompt) - 1 if tokens is None else tokens])
    return kv


def insert_all(cache: PrefixCache, prompt: list[int]) -> None:
    keys = cache.keys(prompt, "")
    for chunk in range(len(keys)):
        cache.insert(keys, chunk, filled(cache.layout, prompt, (chunk + 1) * CHUNK))


def restore(hit: PrefixHit, kv: FakeKV, first_chunk: int = 0) -> None:
    for chunk in range(first_chunk, hit.tokens // CHUNK):
        hit.copy_rows(kv, chunk)
    hit.copy_states(kv)
    kv.attach(hit.tokens)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + i * 7) % 256 for i in range(length)]


@pytest.mark.parametrize("layout", [FULL, WINDOWED, STATEFUL])
def test_hit_restores_the_same_bytes(layout: KVLayout) -> None:
    cache, prompt = PrefixCache(layout, 1 << 20), prompt_of(15)
    insert_all(cache, prompt)
    hit = cache.find(cache.keys(prompt, ""))
    assert hit is not None
    assert hit.tokens == 12
    restored = FakeExecutor(layout).allocate(20)
    restore(hit, restored)
    original = filled(layout, prompt, 12)
    assert restored.tokens == 12
    for i, tensor in enumerate(layout.tensors):
        span = (0, 12) if tensor.kind.grows else layout.kept_span(i, 12)
        assert bytes(restored.read(i, *span)) == bytes(original.read(i, *span))
    assert cache.pinned() == 3
    hit.release()
    hit.release()
    assert cache.pinned() == 0


def test_last_token_of_the_prompt_is_never_part_of_a_hit() -> None:
    cache = PrefixCache(FULL, 1 << 20)
    assert len(cache.keys(prompt_of(13), "")) == 3
    assert len(cache.keys(prompt_of(12), "")) == 2


def test_tenants_do_not_share_and_gateways_know_the_same_keys() -> None:
    prompt, cache = prompt_of(13), PrefixCache(FULL, 1)
    assert cache.keys(prompt, "") != cache.keys(prompt, "t")
    assert cache.keys(prompt, "t") == prefix_keys(prompt[:-1], FULL.prefill_chunk_tokens, "t")


def test_limit_zero_is_off() -> None:
    cache = PrefixCache(FULL, 0)
    assert cache.keys(prompt_of(50), "") == ()


def test_oldest_chain_goes_first_and_its_end_before_its_beginning() -> None:
    cache = PrefixCache(FULL, 4 * CHUNK_BYTES)
    old, new = prompt_of(13, 1), prompt_of(9, 2)
    insert_all(cache, old)
    insert_all(cache, new)
    assert cache.used_bytes == 4 * CHUNK_BYTES
    hit = cache.find(cache.keys(old, ""))
    assert hit is not None
    assert hit.tokens == 8
    hit.release()
    cache.check_integrity()


def test_pinned_snapshots_stay_and_a_chain_does_not_evict_itself() -> None:
    cache = PrefixCache(FULL, 2 * CHUNK_BYTES)
    prompt = prompt_of(17)
    insert_all(cache, prompt)
    hit = cache.find(cache.keys(prompt, ""))
    assert hit is not None
    assert hit.tokens == 8
    other = prompt_of(9, 3)
    keys = cache.keys(other, "")
    assert not cache.insert(keys, 0, filled(FULL, other))
    hit.release()
    assert cache.insert(keys, 0, filled(FULL, other))
    cache.check_integrity()


def test_snapshot_larger_than_the_limit_is_not_kept() -> None:
    cache, prompt = PrefixCache(FULL, CHUNK_BYTES - 1), prompt_of(9)
    insert_all(cache, prompt)
    assert cache.used_bytes == 0


def test_windowed_hit_ends_at_a_checkpoint() -> None:
    cache, prompt = PrefixCache(WINDOWED, 1 << 20), prompt_of(17)
    keys = cache.keys(prompt, "")
    whole = filled(WINDOWED, prompt)
    for chunk in range(3):
        cache.insert(keys, chunk, whole)
    assert cache.find(keys) is None
    cache.insert(keys, 1, filled(WINDOWED, prompt, 8))
    hit = cache.find(keys)
    assert hit is not None
    assert hit.tokens == 8
    hit.release()
    cache.check_integrity()


def test_copy_may_leave_out_chunks_that_are_there() -> None:
    cache, prompt = PrefixCache(FULL, 1 << 20), prompt_of(13)
    insert_all(cache, prompt)
    kv = filled(FULL, prompt, 4)
    before = bytes(kv.place(0, 0, 4))
    hit = cache.find(cache.keys(prompt, ""))
    assert hit is not None
    restore(hit, kv, 1)
    hit.release()
    assert bytes(kv.place(0, 0, 4)) == before
    assert bytes(kv.read(0, 0, 12)) == bytes(filled(FULL, prompt).read(0, 0, 12))
