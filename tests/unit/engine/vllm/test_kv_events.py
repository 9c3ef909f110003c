"""vLLM's block events as chunks with our keys: salts, chains, evictions, gaps, and what is left out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from farfill.engine.vllm.kv_events import VllmBlocks
from farfill.kv.hashing import prefix_keys

SIZE, CHUNK = 4, 8
PROMPT = list(range(100, 126))  # six blocks, three chunks, and a rest


def stored(count: int, *, salt: str = "", first: int = 0, name: str = "b", **more: Any) -> dict[str, Any]:
    """Blocks `first` up to `count` of the prompt."""
    extra: list[Any] = [[salt] if salt and number == 0 else None for number in range(first, count)]
    return {
        "type": "BlockStored",
        "block_hashes": [f"{name}{number}".encode() for number in range(first, count)],
        "parent_block_hash": f"{name}{first - 1}".encode() if first else None,
        "token_ids": PROMPT[first * SIZE : count * SIZE],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
        "group_idx": 0,
        **more,
    }


def removed(*names: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [name.encode() for name in names], "medium": "GPU"}


def feed(blocks: VllmBlocks, seq: int, *events: dict[str, Any]) -> set[bytes]:
    blocks.feed(seq, msgspec.msgpack.encode([1.0, list(events), 0]))
    return set(blocks.ledger.snapshot()[1])


@pytest.mark.parametrize("salt", ["", "tenant:salt"])
def test_whole_chunks_have_the_keys_that_gateways_compute(salt: str) -> None:
    blocks = VllmBlocks(CHUNK)
    keys = prefix_keys(PROMPT, CHUNK, salt)
    assert feed(blocks, 0, stored(3, salt=salt)) == {keys[0]}
    assert feed(blocks, 1, stored(6, salt=salt, first=3)) == set(keys)


def test_chunk_goes_with_any_of_its_blocks_and_comes_back_when_stored_again() -> None:
    blocks, keys = VllmBlocks(CHUNK), prefix_keys(PROMPT, CHUNK, "")
    feed(blocks, 0, stored(6))
    assert feed(blocks, 1, removed("b5")) == set(keys[:2])
    assert feed(blocks, 2, removed("b2")) == {keys[0]}
    assert feed(blocks, 3, removed("b3", "b4", "unheard-of")) == {keys[0]}
    assert feed(blocks, 4, stored(6, first=2)) == set(keys)


def test_gap_unreadable_batch_and_reset_empty_it_and_the_next_ones_count() -> None:
    blocks, keys = VllmBlocks(CHUNK), prefix_keys(PROMPT, CHUNK, "")
    feed(blocks, 7, stored(2))
    assert feed(blocks, 9, stored(6, first=2)) == set(), "its beginning is not known any more"
    assert feed(blocks, 10, stored(4)) == set(keys[:2])
    assert feed(blocks, 11, {"type": "AllBlocksCleared"}) == set()
    feed(blocks, 12, stored(2))
    blocks.feed(13, b"\xc1")
    assert not len(blocks.ledger)


@pytest.mark.parametrize(
    "left_out",
    [
        stored(2, medium="CPU"),
        stored(2, group_idx=1),
        stored(2, lora_id=3),
        stored(2, extra_keys=[[["image", 0]], None]),
        stored(2, extra_keys=[["salt", "adapter"], None]),
        stored(2, block_size=3, token_ids=PROMPT[:6]),
        stored(4, first=2),
    ],
)
def test_what_gateways_could_not_know_is_left_out(left_out: dict[str, Any]) -> None:
    assert feed(VllmBlocks(CHUNK), 0, left_out) == set()
