"""A prefill step tells of every layer as soon as its rows can be read."""

from __future__ import annotations

from typing import Any

import pytest

from farfill.engine.fake import FakeExecutor, fake_layout

CHUNK = 16


@pytest.fixture
def executor(kind: str, tiny_models: Any) -> Any:
    if kind.startswith("fake"):
        return FakeExecutor(fake_layout(CHUNK, 23 if kind == "fake-window" else 0))
    return tiny_models.load(kind).executor


def test_rows_of_a_finished_layer_are_final_before_the_chunk_is(executor: Any) -> None:
    kv = executor.allocate(3 * CHUNK)
    growing = [i for i, tensor in enumerate(executor.layout.tensors) if tensor.kind.grows]
    for start in (0, CHUNK):
        seen: dict[int, bytes] = {}
        layers: list[int] = []

        def keep(layer: int, start: int = start, seen: dict[int, bytes] = seen, layers: list[int] = layers) -> None:
            layers.append(layer)
            assert start == kv.tokens, "the step is not over"
            for i in growing:
                if executor.layout.tensors[i].layer == layer:
                    seen[i] = bytes(kv.read(i, start, start + CHUNK))

        executor.prefill(kv, list(range(40, 40 + CHUNK)), keep)
        assert layers == sorted({tensor.layer for tensor in executor.layout.tensors})
        assert kv.tokens == start + CHUNK
        assert set(seen) == set(growing)
        assert all(seen[i] == bytes(kv.read(i, start, start + CHUNK)) for i in growing)


def test_an_error_of_the_listener_ends_the_step_and_can_be_undone(executor: Any) -> None:
    kv, clean = executor.allocate(2 * CHUNK), executor.allocate(2 * CHUNK)
    tokens = list(range(50, 50 + CHUNK))

    def refuse(layer: int) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        executor.prefill(kv, tokens, refuse)
    kv.truncate(0)
    for sequence in (kv, clean):
        executor.prefill(sequence, tokens)
    assert (executor.decode([(kv, 60)]) == executor.decode([(clean, 60)])).all()


def test_other_sequences_may_be_decoded_between_layers(executor: Any) -> None:
    tokens = list(range(60, 60 + CHUNK))
    kv, clean, other, alone = (executor.allocate(2 * CHUNK) for _ in range(4))
    for sequence in (other, alone):
        executor.prefill(sequence, tokens[:5])
    layers: list[int] = []
    steps: list[Any] = []

    def decode(layer: int) -> None:
        layers.append(layer)
        steps.append(executor.decode([(other, 70)]))

    executor.prefill(kv, tokens, decode)
    executor.prefill(clean, tokens)
    assert layers == sorted({tensor.layer for tensor in executor.layout.tensors})
    assert all((step == executor.decode([(alone, 70)])).all() for step in steps)
    assert (executor.decode([(kv, 71)]) == executor.decode([(clean, 71)])).all()
