"""What `farfill plan kv --engine vllm` says is what vLLM sends, byte for byte, for each kind of KV."""

from __future__ import annotations

import json

import pytest
from tests.vllm_engine.calls import prompt_of, start_prefill
from tests.vllm_engine.conftest import BFLOAT16, MODELS, Pair

from farfill.kv.manifest import build_manifest
from farfill.planner.geometry import derive_geometry
from farfill.planner.kv_size import kv_bytes
from farfill.planner.paged import vllm_geometry

LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300, 1000, 1500)


@pytest.mark.parametrize("pair", MODELS, indirect=True)
def test_the_planned_size_is_what_vllm_sends(pair: Pair) -> None:
    layout = pair.decode.info.layout
    config = json.loads((pair.folder / "config.json").read_text())
    dtype = "bfloat16" if pair.name in BFLOAT16 else "float32"
    block_tokens = max(tensor.row_tokens for tensor in layout.tensors)
    planned = vllm_geometry(
        derive_geometry(config, kv_dtype=dtype), block_tokens, state_dtype=config.get("mamba_ssm_dtype")
    ).layout
    told = {tokens: kv_bytes(planned, tokens) for tokens in LENGTHS}
    assert told == {tokens: build_manifest(layout, tokens).total_bytes for tokens in LENGTHS}
    prompt = prompt_of(700)
    handle, pieces = start_prefill(pair.prefill, prompt)
    pieces.wait()
    sent = sum(data.nbytes for data in pieces.pieces.values())
    pieces.pieces.clear()
    handle.release()
    assert sent == kv_bytes(planned, len(prompt) - 1)
