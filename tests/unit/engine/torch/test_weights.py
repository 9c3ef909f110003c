"""Model folders that are not whole, or not the model that config.json says: one line that names the fault."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from farfill.core.errors import ConfigError
from farfill.engine.torch.weights import load_weights, open_config, open_tokenizer


@pytest.fixture
def folder(tiny_models: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models.path("llama"), tmp_path / "model"))


def load(folder: Path) -> Any:
    return load_weights(AutoModelForCausalLM, folder, open_config(folder).model_type, dtype=torch.float32)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, drop: str = "", more: dict[str, torch.Tensor] | None = None) -> None:
    path = next(folder.glob("*.safetensors"))
    kept = {name: tensor for name, tensor in load_file(path).items() if not drop or drop not in name}
    save_file(kept | (more or {}), path, metadata={"format": "pt"})


def test_more_layers_than_weights_are_refused_by_name(folder: Path) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    edit(folder, num_hidden_layers=layers + 2, layer_types=None)
    assert f"the weights lack model.layers.{layers}.input_layernorm.weight" in refusal(folder)


def test_fewer_layers_than_weights_are_refused_by_name(folder: Path) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    edit(folder, num_hidden_layers=layers - 1, layer_types=None)
    assert f"no place for model.layers.{layers - 1}." in refusal(folder)


def test_single_missing_tensor_is_refused_by_name(folder: Path) -> None:
    edit_weights(folder, drop="layers.0.mlp.up_proj")
    assert "the weights lack model.layers.0.mlp.up_proj.weight." in refusal(folder)


def test_tensors_of_another_shape_are_refused_with_both_shapes(folder: Path) -> None:
    edit(folder, vocab_size=128)
    assert "model.embed_tokens.weight" in (text := refusal(folder))
    assert "not (128, " in text


@pytest.mark.parametrize("name", ["vision_tower.blocks.0.weight", "model.visual.proj.weight", "mtp.layers.0.weight"])
def test_parts_of_other_tasks_are_left_out(folder: Path, name: str) -> None:
    edit_weights(folder, more={name: torch.zeros(2)})
    assert load(folder).config.model_type == "llama"


def test_tied_head_need_not_be_in_the_file(folder: Path) -> None:
    edit(folder, tie_word_embeddings=True)
    edit_weights(folder, drop="lm_head")
    net = load(folder)
    assert net.lm_head.weight is net.model.embed_tokens.weight


def test_cut_off_file_is_named(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size // 2)
    assert f"{path.name} is not whole" in refusal(folder)


def test_file_that_only_the_index_names_is_named(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-2.safetensors" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json is no index" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{oops", "config.json is not valid JSON"),
        ("[]", "config.json has no model_type"),
        ('{"model_type": "wonder9"}', "model_type wonder9 is not one"),
        ('{"model_type": "llama", "vocab_size": "many"}', "config.json: model_type llama: "),
    ],
)
def test_faulty_config_is_refused(folder: Path, text: str, why: str) -> None:
    (folder / "config.json").write_text(text)
    assert why in refusal(folder)


def test_model_of_another_kind_is_refused_by_its_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit"}')
    assert "model_type vit" in refusal(folder)


def test_quantised_weights_without_their_package_name_it(folder: Path) -> None:
    edit(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    assert "wants a package that is not here" in (text := refusal(folder))
    assert "optimum" in text


def test_faulty_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(folder)
