"""An executor whose KV lives on a device of its own, played by the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from farfill.engine.torch import attention
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.kv import KVSpec
from farfill.engine.torch.layout import derive_shape
from farfill.kv.manifest import build_manifest
from support.architectures import make_model

CHUNK = 16
TOKENS = [(11 * i * i + 5) % 250 for i in range(37)]


def executor(net: Any, *, staged: bool) -> TorchExecutor:
    shape = derive_shape(net, CHUNK)
    spec = KVSpec(shape.layout, net.device, num_layers=shape.num_layers, chunked=shape.chunked, staged=staged)
    return TorchExecutor(net, spec)


@pytest.fixture(params=["qwen3_next", "gemma3", "zamba2"])
def both(request: pytest.FixtureRequest) -> tuple[TorchExecutor, TorchExecutor]:
    attention.register()
    net = make_model(request.param)
    net.set_attn_implementation(attention.SDPA)
    return executor(net, staged=False), executor(net, staged=True)


def prefilled(executor: TorchExecutor, events: list[tuple[str, int]], seen: dict[int, bytes]) -> Any:
    """A sequence of three chunks, whose growing rows are read as soon as layers are done."""
    kv = executor.allocate(len(TOKENS) + 4)
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: events.append(("ran", index)))
        for index, layer in enumerate(executor._decoder.layers)
    ]
    for chunk, group in enumerate(build_manifest(executor.layout, len(TOKENS)).by_prefill_chunk):

        def read(layer: int, group: Any = group) -> None:
            events.append(("told", layer))
            for piece in group:
                tensor = executor.layout.tensors[piece.tensor]
                if tensor.layer == layer and tensor.kind.grows:
                    seen[piece.index] = bytes(kv.read(piece.tensor, piece.start_token, piece.end_token))

        executor.prefill(kv, TOKENS[chunk * CHUNK : (chunk + 1) * CHUNK], read)
    for hook in hooks:
        hook.remove()
    for piece in build_manifest(executor.layout, len(TOKENS)).by_prefill_chunk[-1]:
        if not executor.layout.tensors[piece.tensor].kind.grows:
            seen[piece.index] = bytes(kv.read(piece.tensor, piece.start_token, piece.end_token))
    return kv


def test_what_leaves_and_arrives_through_the_mirror_is_what_is_computed(
    both: tuple[TorchExecutor, TorchExecutor],
) -> None:
    direct, staged = both
    expected: dict[int, bytes] = {}
    seen: dict[int, bytes] = {}
    events: list[tuple[str, int]] = []
    source, mirrored = prefilled(direct, [], expected), prefilled(staged, events, seen)
    assert seen == expected
    arrived = staged.allocate(len(TOKENS) + 4)
    for piece in build_manifest(staged.layout, len(TOKENS)).pieces:
        arrived.place(piece.tensor, piece.start_token, piece.end_token)[:] = seen[piece.index]
    arrived.attach(len(TOKENS))
    copies = [mirrored, arrived, arrived.fork()]
    logits = direct.decode([(source, 9)])[0]
    for kv in copies:
        assert (staged.decode([(kv, 9)])[0] == logits).all()


def test_a_layer_is_told_of_when_the_next_one_was_started(both: tuple[TorchExecutor, TorchExecutor]) -> None:
    _, staged = both
    events: list[tuple[str, int]] = []
    prefilled(staged, events, {})
    count = len(staged._decoder.layers)
    chunk = events[: 2 * count]
    assert [index for what, index in chunk if what == "told"] == list(range(count))
    for index in range(count - 1):
        assert chunk.index(("told", index)) + 1 == chunk.index(("ran", index + 1))
