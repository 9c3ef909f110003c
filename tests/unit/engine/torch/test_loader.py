"""Loading model folders: what is refused, what the fingerprint covers, and agreement with transformers' generate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from farfill.config.model import EngineConfig, ModelConfig, PrefillConfig
from farfill.core.errors import ConfigError, ModelUnsupportedError
from farfill.core.layout import TensorKind
from farfill.engine.fake import EOS_ID, byte_tokenizer
from farfill.engine.fingerprint import fingerprint
from farfill.engine.torch import load_engine
from farfill.engine.torch.layout import derive_shape


@pytest.fixture(autouse=True)
def _no_check_is_remembered(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


PREFILL = PrefillConfig(chunked_prefill_tokens=16)


def model_config(path: Path, dtype: str = "float32") -> ModelConfig:
    return ModelConfig.model_validate({"name": "tiny", "path": path, "dtype": dtype})


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_tokens_are_those_of_transformers_generate(architecture: str, tiny_models: Any, harness: Any) -> None:
    path = tiny_models.path(architecture)
    engine = load_engine(model_config(path), EngineConfig(threads=1), PREFILL, path.parent)
    engine.start()
    prompt = harness.prompt(60)
    ours = harness.generate(engine, harness.work(prompt, max_tokens=40, ignore_eos=False)).tokens()
    engine.close()
    net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = net.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=EOS_ID)
    assert ours == theirs[0, 60:].tolist()


def test_layout_names_every_tensor(tiny_models: Any) -> None:
    layout = tiny_models.load("gemma3-bfloat16").info.layout
    assert [t.kind for t in layout.tensors[::2]] == [TensorKind.WINDOW, TensorKind.FULL, TensorKind.WINDOW]
    assert {(t.dtype, t.row_shape) for t in layout.tensors} == {("bfloat16", (2, 16))}
    assert [t.window_tokens for t in layout.tensors[::2]] == [23, 0, 23]
    assert not layout.resumable
    assert tiny_models.load("llama-float32").info.layout.resumable


def test_fingerprint_covers_weights_config_tokenizer_template_dtype_and_chunk(tiny_models: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.path("llama"), folder)
    layout = tiny_models.load("llama-float32").info.layout
    seen = {fingerprint(folder, layout, "float32")}
    assert seen == {fingerprint(tiny_models.path("llama"), layout, "float32")}

    def changes(what: str, dtype: str = "float32", chunk: int = 16) -> None:
        print_ = fingerprint(folder, type(layout)(layout.tensors, chunk), dtype)
        assert print_ not in seen, what
        seen.add(print_)

    changes("dtype", dtype="bfloat16")
    changes("chunk", chunk=32)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    changes("chat template")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    changes("tokenizer")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    changes("config")
    before = fingerprint(folder, layout, "float32")
    (folder / "config.json").write_text(
        json.dumps({**config, "rms_norm_eps": 0.5, "transformers_version": "9", "_name_or_path": "elsewhere"})
    )
    assert fingerprint(folder, layout, "float32") == before
    weights = next(folder.glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    changes("weights")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_folder_is_refused(tiny_models: Any, tmp_path: Path, missing: str) -> None:
    shutil.copytree(tiny_models.path("llama"), tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(ConfigError, match="farfill model fetch"):
        load_engine(model_config(Path("model")), EngineConfig(threads=1), PREFILL, tmp_path)


def test_prefix_cache_larger_than_the_kv_cache_is_refused(tiny_models: Any) -> None:
    limits = EngineConfig(threads=1, kv_cache_mb=16, prefix_cache_mb=16)
    with pytest.raises(ConfigError, match="prefix_cache_mb"):
        load_engine(model_config(tiny_models.path("llama")), limits, PREFILL, Path())


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


def test_rotary_embeddings_that_depend_on_the_batch_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    net = AutoModelForCausalLM.from_config(LlamaConfig(rope_parameters=rope, **SMALL)).eval()
    with pytest.raises(ModelUnsupportedError, match="dynamic rotary"):
        derive_shape(net, 16)


def test_model_that_is_not_what_its_cache_says_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from farfill.engine.torch.rows import FullRows

    net = AutoModelForCausalLM.from_config(Qwen2Config(initializer_range=0.3, **SMALL))
    net.save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    load_engine(model_config(tmp_path), EngineConfig(threads=1), PREFILL, Path()).close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    attach = FullRows.attach

    def forgetful(layer: FullRows, tokens: int) -> None:
        attach(layer, tokens)
        layer.key_rows[:3] = 0

    monkeypatch.setattr(FullRows, "attach", forgetful)
    with pytest.raises(ModelUnsupportedError, match="from moved KV"):
        load_engine(model_config(tmp_path), EngineConfig(threads=1), PREFILL, Path())
