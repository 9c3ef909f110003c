"""The copies alone, without a running vLLM: what a load that fails in the middle of a step leaves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

TOKENS, BLOCKS, HEADS = 32, 12, 2


def _copier(groups: int, *, rank: int = 0, ranks: int = 1):
    """One rank's, and its caches: `HEADS` heads are spread over all ranks."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from farfill.engine.vllm.blocks import BlockCopier
    from farfill.engine.vllm.messages import CacheTensor, Hello

    heads = HEADS // ranks
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=32, dtype=torch.float32)
    names = [f"layers.{index}.attn" for index in range(groups)]
    caches = {name: torch.zeros(BLOCKS, heads, TOKENS, 64) for name in names}
    tensors = tuple(
        CacheTensor(index, name, "full", TOKENS, heads * TOKENS * 64 * 4, 0, True) for index, name in enumerate(names)
    )
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name in names], num_blocks=BLOCKS
    )
    return BlockCopier(config, caches, Hello(1, "0", "cpu", "f", rank, ranks, BLOCKS, 4096, tensors)), caches


def _import(folder: Path, groups: int, *, size: int = 4 * 2 * TOKENS * 64 * 4):
    from farfill.engine.vllm.blocks import Import, rank_file

    file = folder / "k"
    Path(rank_file(str(file), 0)).write_bytes(os.urandom(size * groups))
    return Import("k", str(file), 100, 0, 100, tuple((3, 5, 7, 9) for _ in range(groups)))


def test_a_file_goes_into_its_blocks(tmp_path: Path) -> None:
    copier, caches = _copier(1)
    item = _import(tmp_path, 1)
    content = (tmp_path / "k.rank0").read_bytes()
    assert copier.load(item)
    (cache,) = caches.values()
    assert b"".join(cache[block].numpy().tobytes() for block in (3, 5, 7, 9)) == content
    assert not cache[[0, 1, 2, 4, 6, 8, 10, 11]].any()
    assert not (tmp_path / "k.rank0").exists()


@pytest.mark.parametrize("short", [True, False])
def test_a_load_that_fails_names_its_blocks(tmp_path: Path, short: bool) -> None:
    """So that vLLM fails the request or computes it, as its `kv_load_failure_policy` says."""
    copier, _ = _copier(1)
    item = _import(tmp_path, 1, size=100)
    if not short:
        (tmp_path / "k.rank0").unlink()
    assert not copier.load(item)
    assert copier.blocks_of(item) == {3, 5, 7, 9}
    assert copier.blocks_of(replace(item, local_tokens=TOKENS)) == {5, 7, 9}


def test_with_several_kinds_of_layers_a_load_may_fail_too(tmp_path: Path) -> None:
    copier, _ = _copier(2)
    assert copier.load(_import(tmp_path, 2))
    assert not copier.load(_import(tmp_path, 2, size=100))


def test_heads_of_two_ranks_are_the_blocks_of_one(tmp_path: Path) -> None:
    """What each rank leaves in a row is its part of it; one rank reads all, and two read what one left."""
    import torch

    from farfill.engine.vllm.blocks import Export, Import, rank_file

    file, ids = tmp_path / "k", ((3, 5, 7, 9),)
    file.write_bytes(bytes(4 * HEADS * TOKENS * 64 * 4))
    halves = [_copier(1, rank=rank, ranks=2) for rank in range(2)]
    for copier, caches in halves:
        (cache,) = caches.values()
        cache.copy_(torch.rand(cache.shape))
        copier.save(Export("k", str(file), 100, 0, 100, ids))
    whole, caches = _copier(1)
    os.link(file, rank_file(str(file), 0))
    assert whole.load(Import("k", str(file), 100, 0, 100, ids))
    (cache,) = caches.values()
    both = torch.cat([next(iter(half.values())) for _, half in halves], dim=1)
    assert torch.equal(cache[[3, 5, 7, 9]], both[[3, 5, 7, 9]])
    whole.save(Export("k", str(file), 100, 0, 100, ids))
    for rank in range(2):
        copier, caches = _copier(1, rank=rank, ranks=2)
        os.link(file, rank_file(str(file), rank))
        assert copier.load(Import("k", str(file), 100, 0, 100, ids))
        (cache,) = caches.values()
        assert torch.equal(cache[[3, 5, 7, 9]], both[[3, 5, 7, 9]][:, rank : rank + 1])
