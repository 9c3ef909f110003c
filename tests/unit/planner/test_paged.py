"""Sizes of caches in blocks are those of the manifest of such a cache."""

from __future__ import annotations

import json

import pytest

from farfill.core.layout import TensorKind
from farfill.kv.manifest import build_manifest
from farfill.planner.geometry import derive_geometry
from farfill.planner.kv_size import kv_bytes, rank_bytes
from farfill.planner.paged import vllm_geometry
from support.architectures import ARCHITECTURES, make_config

BLOCK = 16


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_size_is_that_of_the_manifest(name: str) -> None:
    config = json.loads(make_config(name).to_json_string())
    plain = derive_geometry(config, kv_dtype="bfloat16")
    paged = vllm_geometry(plain, BLOCK)
    for tokens in (1, 15, 16, 17, 100, 1000):
        size = kv_bytes(paged.layout, tokens)
        assert size == build_manifest(paged.layout, tokens).total_bytes
    assert paged.layout.bytes_per_token == plain.layout.bytes_per_token
    assert rank_bytes(paged.layout, 64, 1) == kv_bytes(paged.layout, 64)


def test_states_are_as_vllm_keeps_them() -> None:
    config = json.loads(make_config("granitemoehybrid").to_json_string())
    plain = derive_geometry(config, kv_dtype="bfloat16").layout
    kept = vllm_geometry(derive_geometry(config, kv_dtype="bfloat16"), BLOCK).layout
    wide = vllm_geometry(derive_geometry(config, kv_dtype="bfloat16"), BLOCK, state_dtype="float32").layout
    pairs = list(zip(plain.tensors, kept.tensors, wide.tensors, strict=True))
    convs = [(p, k) for p, k, _ in pairs if p.kind is TensorKind.CONV]
    states = [(p, k, w) for p, k, w in pairs if p.kind is TensorKind.RECURRENT]
    assert convs
    assert all(k.row_bytes * p.row_shape[1] == p.row_bytes * (p.row_shape[1] - 1) for p, k in convs)
    assert states
    assert all(2 * k.row_bytes == p.row_bytes == w.row_bytes for p, k, w in states)
