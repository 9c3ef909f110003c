"""KV geometry from a config.json: equal to what the engine keeps, and to published figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from farfill.core.layout import DTYPE_BYTES, TensorKind
from farfill.kv.manifest import build_manifest
from farfill.planner.geometry import derive_geometry
from farfill.planner.kv_size import LayoutKVSize, fixed_bytes, kv_bytes, kv_throughput_bits, rank_bytes, report_kv
from farfill.planner.model_config import UnknownArchitectureError
from farfill.planner.parameters import count_parameters
from support.architectures import ARCHITECTURES, make_config, make_model
from unit.planner.published import MODELS

CHUNK = 16
LLAMA = MODELS["Llama-3.1-8B"].config


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_layout_is_the_one_the_engine_sees(name: str):
    from farfill.engine.torch.layout import derive_shape

    model = make_model(name)
    seen = derive_shape(model, CHUNK).layout
    config = json.loads(model.config.to_json_string())
    assert derive_geometry(config, kv_dtype="float32", prefill_chunk_tokens=CHUNK).layout == seen


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_size_is_that_of_the_manifest(name: str, dtype: str):
    config = json.loads(make_config(name).to_json_string())
    layout = derive_geometry(config, kv_dtype=dtype, prefill_chunk_tokens=CHUNK).layout
    for tokens in (1, 15, 16, 23, 24, 100):
        assert kv_bytes(layout, tokens) == build_manifest(layout, tokens).total_bytes


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 200])
def test_size_with_checkpoints_is_that_of_the_manifest(tokens: int):
    config = json.loads(make_config("kimi_linear").to_json_string())
    layout = replace(derive_geometry(config, prefill_chunk_tokens=CHUNK).layout, checkpoint_every_chunks=2)
    assert kv_bytes(layout, tokens) == build_manifest(layout, tokens).total_bytes


@pytest.mark.parametrize("name", sorted(MODELS))
def test_published_sizes_are_met(name: str):
    known = MODELS[name]
    layout = derive_geometry(known.config, kv_dtype="bfloat16").layout
    assert layout.bytes_per_token == known.bytes_per_token
    if known.fixed_mb or not any(t.kind is TensorKind.RECURRENT for t in layout.tensors):
        assert fixed_bytes(layout) / 1e6 == pytest.approx(known.fixed_mb, rel=0.01)


@pytest.mark.parametrize("name", sorted(name for name, known in MODELS.items() if known.parameters_b))
def test_parameters_are_within_three_percent(name: str):
    known = MODELS[name]
    parameters = count_parameters(known.config, derive_geometry(known.config))
    assert parameters.total / 1e9 == pytest.approx(known.parameters_b, rel=0.03)
    assert 0 < parameters.active <= parameters.total


@pytest.mark.parametrize(
    ("model", "tokens", "prefill_s", "gbit_per_s"),
    [
        # HarshavardhanK/Mooncake, prfaas/: 8 H100, SGLang 0.5.9, median prefill times; KV of attention alone.
        ("Kimi-Linear-48B-A3B", 1024, 0.0640, 1.03),
        ("Kimi-Linear-48B-A3B", 32768, 0.3634, 5.82),
        ("Kimi-Linear-48B-A3B", 131072, 1.610, 5.25),
        ("Qwen2.5-72B", 8192, 0.3806, 56.0),
        ("Qwen2.5-72B", 16384, 0.798, 54.0),
    ],
)
def test_measured_kv_throughput_is_met(model: str, tokens: int, prefill_s: float, gbit_per_s: float):
    growing = derive_geometry(MODELS[model].config, kv_dtype="bfloat16").layout.bytes_per_token * tokens
    assert kv_throughput_bits(growing, prefill_s) / 1e9 == pytest.approx(gbit_per_s, rel=0.02)


_DELTA = {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 4}


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("gemma2", {"sliding_window": 8}, "window full window full window full"),
        ("mistral", {"sliding_window": 8}, "window window window window window window"),
        ("mistral", {"sliding_window": None}, "full full full full full full"),
        ("qwen2", {"sliding_window": 8}, "full full full full full full"),
        (
            "qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            "full full full full window window",
        ),
        ("exaone4", {"sliding_window": 8, "sliding_window_pattern": "LLG"}, "window window full window window full"),
        ("llama4_text", {"attention_chunk_size": 8}, "window window window full window window"),
        ("mimo_v2_flash", {"sliding_window": 8}, "full window window window window full"),
        ("qwen3_5_moe_text", _DELTA, "state state state full state state"),
        ("minimax", {"attn_type_list": [0, 0, 1, 0, 0, 1]}, "state state full state state full"),
        ("lfm2", {"full_attn_idxs": [2, 5]}, "conv conv full conv conv full"),
        ("bamba", {"attn_layer_indices": [1], **_MAMBA}, "state full state state state state"),
        ("gemma3n_text", {"sliding_window": 8, "num_kv_shared_layers": 2}, "window window window window none none"),
    ],
)
def test_patterns_that_only_the_models_code_knows(model_type: str, settings: dict[str, object], words: str):
    base = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": model_type, **base, **settings}
    assert " ".join(derive_geometry(config).layer_words) == words


def test_multi_query_models_keep_one_head():
    config = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert derive_geometry(config).layout.tensors[0].row_shape == (1, 16)
    grown = {**config, "new_decoder_architecture": True, "num_kv_heads": 2}
    assert derive_geometry(grown).layout.tensors[0].row_shape == (2, 16)


def test_sparse_attention_keeps_its_index_except_where_it_is_shared():
    config = {**MODELS["DeepSeek-V3"].config, "model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048}
    assert derive_geometry(config).layout.bytes_per_token == 61 * (576 + 128) * 2
    shared = {**config, "indexer_types": ["full"] + ["shared"] * 60}
    assert derive_geometry(shared).layout.bytes_per_token == (61 * 576 + 128) * 2


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_any_dtype_scales_the_cache(dtype: str):
    per_token = derive_geometry(LLAMA, kv_dtype=dtype).layout.bytes_per_token
    assert per_token == 32 * 2 * 8 * 128 * DTYPE_BYTES[dtype]


def test_the_configs_own_dtype_is_used_and_states_stay_float32():
    config = {**MODELS["Qwen3-Next-80B-A3B"].config, "torch_dtype": "float32"}
    assert {t.dtype for t in derive_geometry(config).layout.tensors} == {"float32"}
    halved = derive_geometry(config, kv_dtype="bfloat16", state_dtype="bfloat16").layout
    assert {t.dtype for t in halved.tensors} == {"bfloat16"}


def test_ranks_split_heads_and_repeat_what_cannot_be_split():
    grouped = derive_geometry(LLAMA).layout
    assert rank_bytes(grouped, 1000, 8) * 8 == kv_bytes(grouped, 1000)
    assert rank_bytes(grouped, 1000, 16) == rank_bytes(grouped, 1000, 8)
    latent = derive_geometry(MODELS["DeepSeek-V3"].config).layout
    assert rank_bytes(latent, 1000, 8) == kv_bytes(latent, 1000)


def test_report_compares_with_all_keys_and_values():
    report = report_kv("qwen", derive_geometry(MODELS["Qwen3-Next-80B-A3B"].config), lengths=(1024, 1 << 20))
    assert report.layers_by_kind == {"state": 36, "full": 12}
    assert report.dense_bytes_per_token == 4 * report.bytes_per_token
    assert report.rows[0].smaller_by < 1.0  # states outweigh short prompts
    assert report.rows[1].smaller_by == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "brand_new"}, "model_type 'brand_new' is not known"),
        ({"model_type": "deepseek_v4"}, "model_type deepseek_v4: its layers keep one compressed row"),
        ({"model_type": "llama"}, "num_hidden_layers is missing in the config of this llama model"),
        ({**LLAMA, "num_hidden_layers": -4}, "num_hidden_layers is -4, but must be at least 1"),
        ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers is '32', not a whole number"),
        ({**LLAMA, "layer_types": ["full_attention", *["psychic"] * 31]}, "names a layer of type 'psychic'"),
        ({**LLAMA, "layer_types": "full"}, "layer_types: 'full' is not a list of texts"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({**LLAMA, "hidden_size": None}, "hidden_size is missing"),
        ({**LLAMA, "num_kv_shared_layers": 32}, "num_kv_shared_layers is 32, but there are 32 layers"),
        ({**LLAMA, "model_type": "bamba"}, "layer_types is missing"),
        ({**LLAMA, "layer_types": ["mlp"] * 32}, "no layer keeps any state"),
        ({**LLAMA, "torch_dtype": "float3"}, "torch_dtype is 'float3', not one of float32"),
        ({**LLAMA, "dtype": "torch.half"}, "--kv-dtype, in a plan file model.kv_dtype"),
        ({**LLAMA, "dtype": 16}, "dtype is 16, not one of"),
        ({**LLAMA, "dtype": {"kv": "int8"}}, "dtype is {'kv': 'int8'}, not one of"),
        (
            {**LLAMA, "num_key_value_heads": 64},
            "num_key_value_heads is 64, which does not divide the 32 attention heads",
        ),
        ({**LLAMA, "num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide"),
        ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads is 0, but must be at least 1"),
        ({**LLAMA, "num_key_value_heads": True}, "num_key_value_heads is True, not a whole number"),
        ({**LLAMA, "num_attention_heads": 32.0}, "num_attention_heads is 32.0, not a whole number"),
        ({**LLAMA, "num_attention_heads": -32}, "num_attention_heads is -32, but must be at least 1"),
        ({**LLAMA, "hidden_size": 4100}, "hidden_size is 4100, which 32 attention heads do not divide"),
        ({**LLAMA, "hidden_size": 16}, "add head_dim: the width of a head"),
        ({**LLAMA, "head_dim": "128"}, "head_dim is '128', not a whole number"),
        ({**LLAMA, "head_dim": 0}, "head_dim is 0, but must be at least 1"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0, but must be at least 1"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but may be at most 4096"),
        ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        ({**LLAMA, "layer_types": ["full_attention"] * 31}, "layer_types names 31 layers, but num_hidden_layers is 32"),
        ({**LLAMA, "layer_types": []}, "layer_types is empty"),
        ({**LLAMA, "layer_types": [None] * 32}, "is not a list of texts"),
        ({**LLAMA, "num_kv_shared_layers": 40}, "num_kv_shared_layers is 40, but there are 32 layers"),
        ({**LLAMA, "num_kv_shared_layers": -1}, "num_kv_shared_layers is -1, but must be at least 0"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 0}, "sliding_window is 0, but must be at least 2"),
        (
            {**LLAMA, "model_type": "mistral", "sliding_window": -4096},
            "sliding_window is -4096, but must be at least 2",
        ),
        ({**LLAMA, "model_type": "mistral", "sliding_window": "4096"}, "sliding_window is '4096', not a whole number"),
        (
            {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": "false"},
            "use_sliding_window is 'false', neither true nor false",
        ),
        ({**LLAMA, "kv_lora_rank": 512}, "qk_rope_head_dim is missing, but layers keep latents"),
        ({**LLAMA, "kv_lora_rank": 0, "qk_rope_head_dim": 64}, "kv_lora_rank is 0, but must be at least 1"),
        ({**LLAMA, "model_type": "deepseek_v3"}, "kv_lora_rank is missing, but layers keep latents"),
        ({**LLAMA, "model_type": "minimax", "attn_type_list": [True] * 32}, "is not a list of whole numbers"),
        ({**LLAMA, "model_type": "minimax", "attn_type_list": [1] * 30}, "attn_type_list names 30 layers"),
        ({**LLAMA, "model_type": "lfm2", "full_attn_idxs": [2, 32]}, "names layer 32, but layers are 0 to 31"),
        ({**LLAMA, "model_type": "kimi_linear", "linear_attn_config": []}, "is [], not a group of fields"),
        (
            {**LLAMA, "model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [0, 4]}},
            "full_attn_layers names layer 0, but layers are 1 to 32",
        ),
        (
            {**LLAMA, "model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 8},
            "attn_layer_offset is 8, but may be at most 7",
        ),
        ({**LLAMA, "model_type": "nemotron_h", "hybrid_override_pattern": ["M", "*"]}, "not a text"),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, object], told: str):
    with pytest.raises(UnknownArchitectureError) as caught:
        derive_geometry(config)
    assert told in str(caught.value)


def test_an_unknown_type_can_be_read_as_a_known_one():
    assert derive_geometry({**LLAMA, "model_type": "brand_new"}, like="llama").layout == derive_geometry(LLAMA).layout


def test_a_dtype_that_is_not_known_is_refused():
    with pytest.raises(UnknownArchitectureError, match="dtype 'float3' is not known"):
        derive_geometry(LLAMA, kv_dtype="float3")


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "kimi_linear", "lfm3"])
@pytest.mark.parametrize("every", [0, 2])
def test_sizes_taken_together_are_the_same(name: str, every: int):
    config = json.loads(make_config(name).to_json_string())
    layout = replace(derive_geometry(config, prefill_chunk_tokens=CHUNK).layout, checkpoint_every_chunks=every)
    for tokens in (1, 23, 24, 33, 100):
        assert LayoutKVSize(layout).bytes_at(tokens) == kv_bytes(layout, tokens)


def test_layers_that_only_predict_ahead_are_left_out():
    types = ["full_attention"] * 35
    assert derive_geometry({**LLAMA, "layer_types": types, "num_nextn_predict_layers": 3}).num_layers == 32


def test_a_given_type_of_the_cache_makes_the_models_own_not_matter():
    found = derive_geometry({**LLAMA, "torch_dtype": "float3"}, kv_dtype="int8")
    assert {t.dtype for t in found.layout.tensors} == {"int8"}
    assert derive_geometry({**LLAMA, "torch_dtype": "auto"}).layout == derive_geometry(LLAMA).layout
