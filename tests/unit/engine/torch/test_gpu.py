"""On a GPU: KV leaves through pinned memory while layers are computed, and means the same as on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from farfill.config.model import ModelConfig
from farfill.engine.torch.loader import LoadOptions, load_model
from farfill.kv.manifest import build_manifest
from support.architectures import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

CHUNK = 16
TOKENS = [(11 * i * i + 5) % 250 for i in range(60)]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_next", "falcon_h1", "deepseek_v3", "gpt_oss"])
def executors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder)
    model = ModelConfig.model_validate({"name": "tiny", "path": folder, "dtype": "float32"})
    return {device: load_model(folder, model, CHUNK, LoadOptions(device=device)).executor for device in ("cpu", "cuda")}


def prefilled(executor: Any, layer_done: Any = None) -> Any:
    kv = executor.allocate(len(TOKENS) + 4)
    for start in range(0, len(TOKENS) - 1, CHUNK):
        executor.prefill(kv, TOKENS[start : min(start + CHUNK, len(TOKENS) - 1)], layer_done)
    return kv


def moved(source: Any, target: Any, tokens: int) -> Any:
    kv = target.allocate(tokens + 4)
    for piece in build_manifest(target.layout, tokens).pieces:
        span = piece.tensor, piece.start_token, piece.end_token
        kv.place(*span)[:] = source.read(*span)
    kv.attach(tokens)
    return kv


def test_layouts_are_the_same_and_kv_moves_both_ways(executors: dict[str, Any]) -> None:
    cpu, gpu = executors["cpu"], executors["cuda"]
    assert cpu.layout == gpu.layout
    tokens = len(TOKENS) - 1
    on_cpu, on_gpu = prefilled(cpu), prefilled(gpu)
    expected = cpu.decode([(on_cpu.fork(), TOKENS[-1])])[0]
    for executor, source in ((cpu, on_gpu), (gpu, on_cpu), (gpu, on_gpu), (cpu, on_cpu)):
        logits = executor.decode([(moved(source, executor, tokens), TOKENS[-1])])[0]
        assert logits == pytest.approx(expected, abs=5e-3)


def test_rows_read_between_layers_are_final(executors: dict[str, Any]) -> None:
    gpu = executors["cuda"]
    growing = [i for i, tensor in enumerate(gpu.layout.tensors) if tensor.kind.grows]
    kv = gpu.allocate(len(TOKENS))
    layers: list[int] = []
    seen: dict[tuple[int, int], bytes] = {}
    for start in (0, CHUNK):

        def read(layer: int, start: int = start) -> None:
            layers.append(layer)
            for i in growing:
                if gpu.layout.tensors[i].layer == layer:
                    seen[i, start] = bytes(kv.read(i, start, start + CHUNK))

        gpu.prefill(kv, TOKENS[start : start + CHUNK], read)
    assert layers == sorted(layers[: len(layers) // 2]) * 2
    assert len(seen) == 2 * len(growing)
    assert all(bytes(kv.read(i, start, start + CHUNK)) == rows for (i, start), rows in seen.items())
    assert all(any(rows) for rows in seen.values())


def test_batches_are_decoded_as_alone(executors: dict[str, Any]) -> None:
    gpu = executors["cuda"]
    long, short = prefilled(gpu), gpu.allocate(8)
    gpu.prefill(short, TOKENS[:3])
    alone = [gpu.decode([(kv.fork(), 9)])[0] for kv in (long, short)]
    for ours, theirs in zip(gpu.decode([(long, 9), (short, 9)]), alone, strict=True):
        assert ours == pytest.approx(theirs, abs=5e-3)
