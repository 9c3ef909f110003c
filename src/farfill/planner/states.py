"""What layers keep that do not keep every token: convolution and recurrent states, by model type.

Readers give (channels and kernel of the convolution, shape of the recurrent state); None for what there is not. Shapes
follow Hugging Face transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

from farfill.planner.model_config import Fields

Shape = tuple[int, ...]


def _gated_delta(f: Fields) -> tuple[Shape | None, Shape | None]:
    keys = f.int("linear_num_key_heads", default=f.int("num_attention_heads"))
    values = f.int("linear_num_value_heads", default=keys)
    if values % keys:
        raise f.error("linear_num_value_heads", f"is {values}, which the {keys} of linear_num_key_heads do not divide")
    key_dim, value_dim = f.int("linear_key_head_dim"), f.int("linear_value_head_dim")
    conv = (2 * keys * key_dim + values * value_dim, f.int("linear_conv_kernel_dim", default=4))
    return conv, (values, key_dim, value_dim)


def _kimi_delta(f: Fields) -> tuple[Shape | None, Shape | None]:
    inner = f.group("linear_attn_config") or f
    heads = inner.int("linear_num_heads", "num_heads", "num_attention_heads")
    dim = inner.int("linear_head_dim", "head_dim")
    kernel = inner.int("linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    return (3 * heads * dim, kernel), (heads, dim, dim)


def _lightning(f: Fields) -> tuple[Shape | None, Shape | None]:
    heads = f.int("num_attention_heads")
    dim = f.int("head_dim", default=max(1, f.int("hidden_size") // heads))
    return None, (heads, dim, dim)


def _mamba1(f: Fields) -> tuple[Shape | None, Shape | None]:
    expand, hidden = f.int("mamba_expand", "expand", default=2), f.int("hidden_size")
    inner = f.int("intermediate_size", default=expand * hidden) if f.model_type in PURE_STATE else expand * hidden
    kernel = f.int("mamba_d_conv", "conv_kernel", default=4)
    return (inner, kernel), (inner, f.int("mamba_d_state", "state_size", default=16))


def _mamba2(f: Fields) -> tuple[Shape | None, Shape | None]:
    heads = f.int("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    expanded = f.int("mamba_d_ssm", default=f.int("mamba_expand", "expand", default=2) * f.int("hidden_size"))
    dim = f.int("mamba_d_head", "mamba_head_dim", "mamba_headdim", default=max(1, expanded // heads))
    if f.model_type == "mamba2":
        dim = f.int("head_dim", default=dim)
    groups = f.int("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    state = f.int("mamba_d_state", "ssm_state_size", "state_size")
    kernel = f.int("mamba_d_conv", "conv_kernel", default=4)
    return (heads * dim + 2 * groups * state, kernel), (heads, dim, state)


def _short_conv(f: Fields) -> tuple[Shape | None, Shape | None]:
    return (f.int("hidden_size"), f.int("conv_L_cache", default=7 if f.model_type == "lfm3" else 3)), None


def _gated_recurrence(f: Fields) -> tuple[Shape | None, Shape | None]:
    width = f.int("lru_width", default=f.int("hidden_size"))
    return (width, f.int("conv1d_width", default=4)), (width,)


STATE_READERS: dict[str, Callable[[Fields], tuple[Shape | None, Shape | None]]] = {
    "qwen3_next": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_5": _gated_delta,
    "qwen3_5_moe": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "olmo_hybrid": _gated_delta,
    "kimi_linear": _kimi_delta,
    "bailing_hybrid": _kimi_delta,
    "minimax": _lightning,
    "minimax_m1": _lightning,
    "minimax_text_01": _lightning,
    "jamba": _mamba1,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "mamba2": _mamba2,
    "bamba": _mamba2,
    "granitemoehybrid": _mamba2,
    "falcon_h1": _mamba2,
    "nemotron_h": _mamba2,
    "zamba2": _mamba2,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "lfm3": _short_conv,
    "recurrent_gemma": _gated_recurrence,
}
STATE_PERIOD = {
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5": 4,
    "qwen3_5_moe": 4,
    "qwen3_5_moe_text": 4,
    "olmo_hybrid": 4,
    "bailing_hybrid": 6,
}
PURE_STATE = {"mamba", "falcon_mamba", "mamba2"}
STATE_AS_KV = {"minimax", "minimax_m1", "minimax_text_01"}
