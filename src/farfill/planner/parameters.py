"""How many parameters a model has, and how many each token uses, from its config.json: for roofline estimates only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farfill.core.layout import TensorKind, TensorLayout
from farfill.planner.geometry import Geometry
from farfill.planner.model_config import Fields, Json


@dataclass(frozen=True, slots=True)
class Parameters:
    """`active` are used by each token; embeddings are in `total` only. `experts` of which each token uses `chosen`."""

    total: float
    active: float
    experts: int = 1
    chosen: int = 1


def count_parameters(config: Json, geometry: Geometry) -> Parameters:
    """Matrices only, within a few percent of the published counts (tested)."""
    f = Fields(config)
    hidden = f.int("hidden_size", "n_embd", "d_model")
    experts = f.int("num_local_experts", "num_experts", "n_routed_experts", default=1)
    chosen = f.int("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", default=1)
    mixing = sum(_mixing(f, geometry, layer, hidden) for layer in range(geometry.num_layers))
    dense_layers, sparse_layers = _feed_forward_layers(f, geometry, experts)
    width = f.int("intermediate_size", "n_inner", "dense_intermediate_size", default=4 * hidden)
    if experts > 1 and f.has("intermediate_size_mlp"):  # Llama 4: of its dense layers
        width = f.int("intermediate_size_mlp")
    gates = 2 if f.text("mlp_hidden_act") == "relu2" or f.model_type.startswith(("gpt2", "opt", "falcon")) else 3
    dense = dense_layers * gates * hidden * width
    # Some route in a narrower space than the layers': then experts' matrices are that much smaller.
    routed = f.int("moe_latent_size", "routed_expert_hidden_size", default=hidden)
    expert = gates * routed * f.int("moe_intermediate_size", "intermediate_size", default=width)
    shared = gates * hidden * _shared_width(f)
    vocabulary = f.int("vocab_size", default=0, least=0) * hidden
    embeddings = vocabulary * (1 if f.flag("tie_word_embeddings") else 2)
    total = mixing + dense + sparse_layers * (experts * expert + shared) + embeddings
    active = mixing + dense + sparse_layers * (chosen * expert + shared)
    return Parameters(float(total), float(active), experts, min(chosen, experts))


def _mixing(f: Fields, geometry: Geometry, layer: int, hidden: int) -> int:
    """Parameters of what mixes tokens in one layer: attention's projections, or those around a state."""
    count = 0
    tensors = [t for t in geometry.layout.tensors if t.layer == layer]
    kinds = {t.kind for t in tensors}
    heads = f.int("num_attention_heads", "n_head", "num_heads", default=1)
    if TensorKind.LATENT in kinds:
        key = f.int("qk_nope_head_dim") + f.int("qk_rope_head_dim")
        value, rank = f.int("v_head_dim"), f.int("kv_lora_rank")
        query = f.int("q_lora_rank", default=0, least=0)
        count += query * (hidden + heads * key) if query else hidden * heads * key
        count += hidden * (rank + f.int("qk_rope_head_dim"))
        count += rank * heads * (f.int("qk_nope_head_dim") + value) + heads * value * hidden
    elif kinds & {TensorKind.FULL, TensorKind.WINDOW}:
        for tensor in tensors:
            if tensor.name in ("k", "v"):  # projections of the query and of keys, or of values and of the output
                kv_heads, width = tensor.row_shape
                count += hidden * (heads + kv_heads) * width
        count += hidden * heads * tensors[0].row_shape[-1] if f.flag("attn_output_gate") else 0
    conv = next((t.row_shape[0] for t in tensors if t.kind is TensorKind.CONV), 0)
    if conv:  # inputs of the convolution, gate, output
        count += hidden * (conv + 2 * _inner_width(f, tensors, conv))
    if kinds == {TensorKind.RECURRENT}:  # lightning attention
        count += 5 * hidden * heads * (tensors[0].row_shape[-1])
    return count


def _inner_width(f: Fields, tensors: Sequence[TensorLayout], conv: int) -> int:
    """Width of what a layer with a state puts out."""
    state = next((t.row_shape for t in tensors if t.kind is TensorKind.RECURRENT), ())
    if len(state) != 3:
        return conv
    heads, first, second = state
    return heads * (first if f.has("mamba_num_heads", "mamba_n_heads", "n_mamba_heads") else second)


def _feed_forward_layers(f: Fields, geometry: Geometry, experts: int) -> tuple[int, int]:
    """(dense layers, layers of experts)."""
    pattern = f.text("hybrid_override_pattern")
    if pattern is not None:
        return pattern.count("-"), pattern.count("E")
    layers = geometry.num_layers
    if experts <= 1:
        return layers, 0
    if f.flag("enable_moe_block"):  # Gemma 4: both in every layer
        return layers, layers
    kinds = f.texts("mlp_layer_types")
    if kinds is not None:
        return kinds.count("dense"), kinds.count("sparse")
    step = f.int("interleave_moe_layer_step", "decoder_sparse_step", "expert_layer_period", default=1)
    dense = f.int("first_k_dense_replace", default=0, least=0)
    sparse = (layers - dense) // step
    return layers - sparse, sparse


def _shared_width(f: Fields) -> int:
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    width = f.int(*names, default=0, least=0)
    if not width and f.model_type.startswith("llama4"):
        return f.int("intermediate_size")
    if not width:
        shared = f.int("n_shared_experts", "num_shared_experts", default=0, least=0)
        width = shared * f.int("moe_intermediate_size", default=0, least=0)
    return width
