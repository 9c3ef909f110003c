"""The torch KV cache against transformers' own cache layers, and through host buffers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from farfill.core.layout import KVLayout, TensorKind, TensorLayout
from farfill.engine.torch.kv import KVSpec, TorchKV
from farfill.engine.torch.rows import WINDOW_SLACK_TOKENS, Rows
from farfill.engine.torch.step import StepCache

WINDOW = 7
HEADS, DIM = 2, 4
CPU = torch.device("cpu")


def layout(dtype: str = "float32") -> KVLayout:
    return KVLayout(
        tuple(
            TensorLayout(layer, name, kind, dtype, (HEADS, DIM), WINDOW if kind is TensorKind.WINDOW else 0)
            for layer, kind in enumerate((TensorKind.FULL, TensorKind.WINDOW))
            for name in ("k", "v")
        ),
        16,
    )


def states(tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, HEADS, tokens, DIM), generator=generator).to(dtype)


def rows(kv: TorchKV, layer: int) -> Rows:
    found = kv.layers[layer].rows
    assert found is not None
    return found


def append(kv: TorchKV, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
    step = StepCache([kv], ragged=False)
    for layer in (0, 1):
        step.update(states(tokens, seed, dtype), states(tokens, seed + 1, dtype), layer)
    step.commit(tokens)


@given(st.lists(st.one_of(st.just(1), st.integers(1, 100)), min_size=1, max_size=40))
def test_steps_of_any_size_show_attention_what_transformers_does(steps: list[int]) -> None:
    ours = TorchKV(KVSpec(layout(), CPU), sum(steps))
    theirs = [DynamicLayer(), DynamicSlidingWindowLayer(WINDOW + 1)]
    for seed, tokens in enumerate(steps):
        keys, values = states(tokens, 2 * seed), states(tokens, 2 * seed + 1)
        for i, layer in enumerate(theirs):
            assert rows(ours, i).mask_sizes(tokens) == layer.get_mask_sizes(tokens)
            for mine, stock in zip(rows(ours, i).append(keys, values), layer.update(keys, values), strict=True):
                assert torch.equal(mine, stock)
            assert rows(ours, i).length == layer.get_seq_length()


def test_decode_steps_far_beyond_the_slack_keep_the_window() -> None:
    count = 3 * WINDOW_SLACK_TOKENS + 5
    kv, stock = TorchKV(KVSpec(layout(), CPU), count), DynamicSlidingWindowLayer(WINDOW + 1)
    for seed in range(count):
        keys, values = states(1, seed), states(1, seed + 999)
        mine, theirs = rows(kv, 1).append(keys, values), stock.update(keys, values)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 150])
def test_bytes_moved_to_another_sequence_give_the_same_cache(tokens: int, dtype: str, staged: bool) -> None:
    spec = KVSpec(layout(dtype), CPU, staged=staged)
    source, target = TorchKV(spec, tokens + 30), TorchKV(spec, tokens + 60)
    append(source, tokens, 1, getattr(torch, dtype))
    for i, tensor in enumerate(spec.layout.tensors):
        start = 0 if tensor.kind.grows else max(0, tokens - WINDOW)
        view = source.read(i, start, tokens)
        assert view.readonly
        assert view.nbytes == (tokens - start) * tensor.row_bytes
        target.place(i, start, tokens)[:] = view
    target.attach(tokens)
    fork = target.fork()
    assert target.tokens == fork.tokens == tokens
    keys = states(1, 77, getattr(torch, dtype))
    for layer in (0, 1):
        expected = rows(source, layer).append(keys, keys)
        for kv in (target, fork):
            for mine, theirs in zip(rows(kv, layer).append(keys, keys), expected, strict=True):
                assert torch.equal(mine, theirs)


def test_rows_are_exported_without_a_copy() -> None:
    kv = TorchKV(KVSpec(layout(), CPU), 20)
    append(kv, 10, 1)
    view = kv.read(0, 2, 9)
    kv.place(0, 2, 3)[:4] = b"\x00\x00\x80\x3f"
    assert bytes(view[:4]) == b"\x00\x00\x80\x3f"
    assert rows(kv, 0).key_rows[2, 0, 0] == 1.0


def test_truncate_undoes_a_decode_step_that_shifted_the_window() -> None:
    kv = TorchKV(KVSpec(layout(), CPU), 400)
    for seed in range(WINDOW + WINDOW_SLACK_TOKENS):
        append(kv, 1, seed)
    tokens = kv.tokens
    reference = kv.fork()
    step = StepCache([kv], ragged=False)
    for layer in (0, 1):
        step.update(states(1, 5000), states(1, 5001), layer)
    kv.truncate(tokens)
    keys = states(1, 6000)
    for layer in (0, 1):
        expected = rows(reference, layer).append(keys, keys)
        for mine, theirs in zip(rows(kv, layer).append(keys, keys), expected, strict=True):
            assert torch.equal(mine, theirs)


def test_a_mirror_made_within_a_step_serves_outside_of_it() -> None:
    kv = TorchKV(KVSpec(layout(), CPU, staged=True), 20)
    append(kv, 10, 1)
    with torch.inference_mode():
        inside = bytes(kv.read(0, 0, 4))
    assert bytes(kv.read(0, 0, 4)) == inside
    assert bytes(kv.read(0, 2, 10))[: len(inside) // 2] == inside[len(inside) // 2 :]
