"""What the start-up check finds, remembers and forgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from farfill.core.errors import ModelUnsupportedError
from farfill.engine.executor import Capabilities
from farfill.engine.torch import attention
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.kv import KVSpec
from farfill.engine.torch.layout import derive_shape
from farfill.engine.torch.mamba1 import fix_continuation
from farfill.engine.torch.selfcheck import CheckMemory, ModelCheck
from support.architectures import make_model


def check(net: Any) -> tuple[Capabilities, TorchExecutor]:
    attention.register()
    net.set_attn_implementation(attention.SDPA)
    shape = derive_shape(net, 16)
    executor = TorchExecutor(net, KVSpec(shape.layout, net.device, num_layers=shape.num_layers, chunked=shape.chunked))
    return ModelCheck(net).run(executor), executor


@pytest.mark.parametrize("name", ["falcon_mamba", "jamba"])
def test_a_model_that_forgets_its_state_between_chunks_continues_token_by_token(name: str) -> None:
    found, executor = check(make_model(name))
    assert found == Capabilities(chunked_prefill=False, merged_decode=True) == executor.capabilities
    tokens = [(7 * i * i) % 250 for i in range(40)]
    at_once, in_chunks = executor.allocate(50), executor.allocate(50)
    executor.prefill(at_once, tokens)
    layers: list[int] = []
    for start in (0, 16, 32):
        executor.prefill(in_chunks, tokens[start : start + 16], layers.append)
    count = 1 + max(tensor.layer for tensor in executor.layout.tensors)
    assert layers == list(range(count)) * 3
    assert executor.decode([(in_chunks, 5)])[0] == pytest.approx(executor.decode([(at_once, 5)])[0], abs=1e-4)


def test_layers_that_begin_with_a_zero_state_are_fixed() -> None:
    net = make_model("falcon_mamba")
    assert fix_continuation(net) == 3
    assert fix_continuation(make_model("mamba2")) == 0
    assert check(net)[0] == Capabilities()


@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_a_model_that_cannot_be_batched_is_decoded_one_by_one(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: Any, query: torch.Tensor, key: Any, value: Any, **kwargs: Any) -> torch.Tensor:
        if fault == "raises":
            raise TypeError("not a tensor")
        return torch.zeros_like(query).transpose(1, 2)

    monkeypatch.setattr(attention, "_ragged_attention", broken)
    found, executor = check(make_model("llama"))
    assert found == Capabilities(merged_decode=False)
    rows = [(executor.allocate(3), 7), (executor.allocate(3), 9)]
    together = executor.decode(rows)
    alone = [executor.decode([(executor.allocate(3), token)])[0] for token in (7, 9)]
    assert [kv.tokens for kv, _ in rows] == [1, 1]
    assert (together == alone).all()


def test_a_model_that_cannot_decode_what_it_prefilled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from farfill.engine.torch.rows import FullRows

    monkeypatch.setattr(FullRows, "mask_sizes", lambda rows, query_length: (query_length, 0))
    monkeypatch.setattr(FullRows, "append", lambda rows, keys, values: (keys, values))
    with pytest.raises(ModelUnsupportedError, match="decodes differently token by token"):
        check(make_model("llama"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_loses_a_layer_when_its_kv_is_moved_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farfill.engine.torch import selfcheck

    move = selfcheck._move

    def lossy(executor: TorchExecutor, source: Any) -> Any:
        moved = move(executor, source)
        moved.layers[-1].rows.value_rows.zero_()
        return moved

    monkeypatch.setattr(selfcheck, "_move", lossy)
    with pytest.raises(ModelUnsupportedError, match="decodes differently from moved KV"):
        check(make_model("llama").to(dtype))


def test_results_are_remembered_for_the_same_model_device_and_code_only(tmp_path: Path) -> None:
    memory = CheckMemory(tmp_path / "new", "print", ("cpu", "auto"))
    assert memory.recall() is None
    found = Capabilities(chunked_prefill=False)
    memory.remember(found)
    assert CheckMemory(tmp_path / "new", "print", ("cpu", "auto")).recall() == found
    assert CheckMemory(tmp_path / "new", "other", ("cpu", "auto")).recall() is None
    assert CheckMemory(tmp_path / "new", "print", ("cuda", "auto")).recall() is None


def test_what_costs_speed_is_logged_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "_ragged_attention", lambda *args, **kwargs: torch.zeros_like(args[1]).mT)
    memory = CheckMemory(tmp_path, "print", ())
    memory.remember(check(make_model("llama"))[0])
    for _ in range(2):
        (said,) = caplog.records
        assert said.levelname == "WARNING"
        assert "LlamaForCausalLM is decoded one sequence at a time" in said.getMessage()
        caplog.clear()
        assert memory.recall() == Capabilities(merged_decode=False)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"chunked_prefill": true}'])
def test_a_result_that_cannot_be_read_is_no_result(tmp_path: Path, content: str) -> None:
    memory = CheckMemory(tmp_path, "print", ())
    memory.remember(Capabilities())
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert memory.recall() is None


def test_a_model_that_is_wrong_even_token_by_token_after_a_chunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TorchExecutor.prefill

    def forgetful(executor: TorchExecutor, kv: Any, token_ids: Any, layer_done: Any = None) -> None:
        if kv.tokens:
            kv.layers[0].rows.key_rows[:9] = 0
        real(executor, kv, token_ids, layer_done)

    monkeypatch.setattr(TorchExecutor, "prefill", forgetful)
    with pytest.raises(ModelUnsupportedError, match="cannot continue a prompt"):
        check(make_model("llama"))


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memory = CheckMemory(tmp_path / "file", "print", ())
    memory.remember(Capabilities())
    assert memory.recall() is None
