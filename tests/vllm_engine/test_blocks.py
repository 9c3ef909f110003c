"""The copies alone, without a running vLLM: what a load that fails in the middle of a step leaves."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

TOKENS, BLOCKS = 32, 12


def _copier(groups: int, folder: Path):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from farfill.engine.vllm.blocks import BlockCopier
    from farfill.engine.vllm.messages import CacheTensor, Hello

    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    names = [f"layers.{index}.attn" for index in range(groups)]
    caches = {name: torch.zeros(BLOCKS, 2, TOKENS, 64) for name in names}
    tensors = tuple(
        CacheTensor(index, name, "full", TOKENS, 2 * TOKENS * 64 * 4, 0, True) for index, name in enumerate(names)
    )
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name in names], num_blocks=BLOCKS
    )
    return BlockCopier(config, caches, Hello(1, "0", "cpu", "f", 0, 1, BLOCKS, 4096, tensors)), caches


def _import(folder: Path, groups: int, *, size: int = 4 * 2 * TOKENS * 64 * 4):
    from farfill.engine.vllm.blocks import Import, rank_file

    file = folder / "k"
    Path(rank_file(str(file), 0)).write_bytes(os.urandom(size * groups))
    return Import("k", str(file), 100, 0, 100, tuple((3, 5, 7, 9) for _ in range(groups)))


def test_a_file_goes_into_its_blocks(tmp_path: Path) -> None:
    copier, caches = _copier(1, tmp_path)
    item = _import(tmp_path, 1)
    content = (tmp_path / "k.rank0").read_bytes()
    assert copier.load(item) == set()
    (cache,) = caches.values()
    assert b"".join(cache[block].numpy().tobytes() for block in (3, 5, 7, 9)) == content
    assert not cache[[0, 1, 2, 4, 6, 8, 10, 11]].any()
    assert not (tmp_path / "k.rank0").exists()


@pytest.mark.parametrize("short", [True, False])
def test_a_load_that_fails_names_its_blocks(tmp_path: Path, short: bool) -> None:
    """So that vLLM fails the request or computes it, as its `kv_load_failure_policy` says."""
    copier, _ = _copier(1, tmp_path)
    item = _import(tmp_path, 1, size=100)
    if not short:
        (tmp_path / "k.rank0").unlink()
    assert copier.load(item) == {3, 5, 7, 9}


def test_with_several_kinds_of_layers_vllm_cannot_be_told(tmp_path: Path) -> None:
    copier, _ = _copier(2, tmp_path)
    item = _import(tmp_path, 2, size=100)
    with pytest.raises((OSError, ValueError)):
        copier.load(item)
