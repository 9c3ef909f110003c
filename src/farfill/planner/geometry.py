"""The KV cache of a model, from its config.json alone: which tensors each layer keeps, in the engine's own terms.

`derive_geometry` gives the same `KVLayout` as the embedded engine sees in a forward pass (tested for every architecture
it runs). Only known model types are accepted: a wrong guess would give a wrong purchase, not an error.

Shapes follow Hugging Face transformers: a sliding window of w keeps w - 1 tokens; MLA keeps one latent row per token;
convolution states keep the whole kernel; recurrent states are float32 beside a 16-bit cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farfill.core.layout import DTYPE_BYTES, KVLayout, TensorKind, TensorLayout
from farfill.planner.families import ATTENTION_TYPES, DEFAULT_PERIOD, MLA_TYPES, UNSUPPORTED
from farfill.planner.model_config import Fields, Json, UnknownArchitectureError
from farfill.planner.states import PURE_STATE, STATE_AS_KV, STATE_PERIOD, STATE_READERS

DEFAULT_CHUNK_TOKENS = 2048
FULL, WINDOW, STATE, CONV, BOTH, NONE = "full", "window", "state", "conv", "both", "none"

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIMS = ("head_dim", "attention_head_dim", "kv_channels")
_MOST_LAYERS = 4096
_HEADS_FIX = "each of them is shared by equally many attention heads: mend one of the two"
_OPT_IN_WINDOW = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "dots1", "smollm3"}

_TYPE_WORDS = {
    "full_attention": FULL, "attention": FULL, "indexed_attention": FULL, "global": FULL, "*": FULL,
    "sliding_attention": WINDOW, "chunked_attention": WINDOW, "local": WINDOW, "sliding": WINDOW,
    "linear_attention": STATE, "mamba": STATE, "mamba2": STATE, "recurrent": STATE, "M": STATE,
    "conv": CONV, "hybrid": BOTH,
    "moe": NONE, "mlp": NONE, "dummy": NONE, "-": NONE, "E": NONE,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTypes:
    """Dtypes of what is kept. `state` is of recurrent states, which engines keep in float32 unless told otherwise."""

    kv: str
    state: str = "float32"


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's cache. `dense_bytes_per_token` is that of the same layers with all their keys and values kept."""

    model_type: str
    layout: KVLayout
    num_layers: int
    layer_words: tuple[str, ...]
    dense_bytes_per_token: int


def derive_geometry(
    config: Json,
    *,
    kv_dtype: str | None = None,
    state_dtype: str = "float32",
    prefill_chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    like: str | None = None,
) -> Geometry:
    """The cache of the model `config` describes; `like` names a known model type to read it as.

    `kv_dtype` None: the config's own dtype, or bfloat16. Raises UnknownArchitectureError naming type and field.
    """
    fields = Fields(config)
    model_type = like or fields.model_type
    if model_type in UNSUPPORTED:
        raise UnknownArchitectureError(f"model_type {model_type}: {UNSUPPORTED[model_type]}")
    kv = kv_dtype or fields.dtype(DTYPE_BYTES) or "bfloat16"
    for name, value in (("kv_dtype", kv), ("state_dtype", state_dtype)):
        if value not in DTYPE_BYTES:
            raise UnknownArchitectureError(f"{name} {value!r} is not known; give one of: {', '.join(DTYPE_BYTES)}")
    reader = _Reader(fields, model_type, CacheTypes(kv=kv, state=state_dtype))
    words = reader.layer_words()
    tensors: list[TensorLayout] = []
    dense = 0
    for layer, word in enumerate(words):
        tensors += reader.tensors(layer, word)
        if word != NONE:
            dense += reader.dense_row_bytes()
    if not tensors:
        raise UnknownArchitectureError(
            f"model_type {model_type}: no layer keeps any state; is num_hidden_layers right?"
        )
    layout = KVLayout(tuple(tensors), prefill_chunk_tokens)
    return Geometry(fields.model_type, layout, len(words), words, dense)


class _Reader:
    """Reads one config as one model type."""

    def __init__(self, fields: Fields, model_type: str, types: CacheTypes) -> None:
        self._f = fields
        self._type = model_type
        self._types = types
        self._state = STATE_READERS.get(model_type)
        if self._state is None and model_type not in ATTENTION_TYPES:
            raise UnknownArchitectureError(
                f"model_type {model_type!r} is not known, so what its layers keep is not either; if its cache is that"
                " of a known model type, say so with --like, such as --like llama"
            )

    def layer_words(self) -> tuple[str, ...]:
        """What each layer keeps, one word a layer."""
        words = [self._word(name) for name in self._layer_types()]
        shared = self._f.int("num_kv_shared_layers", default=0, least=0)
        if shared >= len(words):
            raise self._f.error("num_kv_shared_layers", f"is {shared}, but there are {len(words)} layers")
        if shared:
            words[-shared:] = [NONE] * shared
        if WINDOW in words and not self._f.has("sliding_window", "attention_chunk_size", "attention_window_size"):
            raise self._f.error("sliding_window", "is missing, but layers have one")
        if self._type == "longcat_flash":  # two attention blocks a layer
            words = [word for word in words for _ in range(2)]
        return tuple(words)

    def tensors(self, layer: int, word: str) -> list[TensorLayout]:
        """What layer number `layer` keeps."""
        found: list[TensorLayout] = []
        if word in (FULL, WINDOW, BOTH):
            found += self._attention(layer, word)
        if word in (STATE, CONV, BOTH):
            found += self._states(layer, word)
        return found

    def dense_row_bytes(self) -> int:
        """Bytes per token of one layer that keeps every key and value of its attention."""
        size = DTYPE_BYTES[self._types.kv]
        if self._is_mla():
            f = self._f
            key = f.int("qk_nope_head_dim") + f.int("qk_rope_head_dim")
            return f.int("num_attention_heads") * (key + f.int("v_head_dim")) * size
        if not self._f.has("num_attention_heads", "n_head", "num_heads") or self._type in PURE_STATE:
            return 2 * self._f.int("hidden_size", "d_model") * size
        heads, key, value = self._heads(self._f, FULL)
        return heads * (key + value) * size

    def _layer_types(self) -> list[str]:
        listed = self._listed_types()
        if listed is None:
            layers = self._layers()
            return self._attention_types(layers) if self._state is None else self._hybrid_types(layers)
        name, types = listed
        if not types:
            raise self._f.error(name, "is empty")
        if not self._f.has(*_LAYERS):
            return types
        layers = self._layers()
        # Some list the layers that only predict further tokens, which serving leaves out, after the others.
        extra = self._f.int("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", default=0, least=0)
        if len(types) not in (layers, layers + extra):
            counted = f"names {len(types)} layers, but {_LAYERS[0]} is {layers},"
            raise self._f.error(name, counted, "make them agree: each layer has one entry")
        return types[:layers]

    def _layers(self) -> int:
        return self._f.int(*_LAYERS, most=_MOST_LAYERS)

    def _listed_types(self) -> tuple[str, list[str]] | None:
        """What the config says layer by layer, and in which field."""
        f = self._f
        for name in ("layer_types", "layers_block_type", "block_types"):
            if (listed := f.texts(name)) is not None:
                if self._type == "recurrent_gemma" and listed:
                    layers = self._layers()
                    return name, ["sliding" if w == "attention" else w for w in (listed * layers)[:layers]]
                return name, list(listed)
        if (pattern := f.text("hybrid_override_pattern")) is not None:
            return "hybrid_override_pattern", list(pattern)
        linear = f.group("linear_attn_config")
        if linear is not None and (full := linear.ints("full_attn_layers")) is not None:
            self._check_layers("linear_attn_config.full_attn_layers", full, first=1)
            return "full_attn_layers", [
                "full_attention" if i + 1 in full else "linear_attention" for i in range(self._layers())
            ]
        for name, one in (("hybrid_layer_pattern", "sliding_attention"), ("attn_type_list", "full_attention")):
            if (flags := f.ints(name)) is not None:
                other = "linear_attention" if name == "attn_type_list" else "full_attention"
                return name, [one if flag else other for flag in flags]
        return None

    def _check_layers(self, name: str, numbers: Sequence[int], *, first: int = 0) -> None:
        """Numbers of layers, counted from `first`, must be of layers there are."""
        last = self._layers() - 1 + first
        wrong = [n for n in numbers if not first <= n <= last]
        if wrong:
            raise self._f.error(name, f"names layer {wrong[0]}, but layers are {first} to {last}")

    def _attention_types(self, layers: int) -> list[str]:
        f = self._f
        if self._type == "mimo_v2_flash":
            return ["sliding_attention" if i and (i + 1) % 6 else "full_attention" for i in range(layers)]
        period = self._period()
        if period:
            chunked = f.has("attention_chunk_size") and not f.has("sliding_window")
            near = "chunked_attention" if chunked else "sliding_attention"
            if near == "sliding_attention" and not f.has("sliding_window"):
                return ["full_attention"] * layers
            types = [near if (i + 1) % period else "full_attention" for i in range(layers)]
            return [*types[:-1], "full_attention"] if self._type.startswith("gemma4") else types
        if not f.has("sliding_window") or not f.flag("use_sliding_window", default=self._type not in _OPT_IN_WINDOW):
            return ["full_attention"] * layers
        full = f.int("max_window_layers", default=0, least=0) if self._type in _OPT_IN_WINDOW else 0
        return ["full_attention" if i < full else "sliding_attention" for i in range(layers)]

    def _period(self) -> int:
        """Every how many layers one is full attention; 0: not by period."""
        f = self._f
        written = f.text("sliding_window_pattern", or_int=True)
        if written:  # "LLLG"
            return len(written)
        if self._type == "llama4_text" and not f.has("attention_chunk_size"):
            return 0
        default = DEFAULT_PERIOD.get(self._type, 0)
        names = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval")
        return f.int(*names, "global_attn_every_n_layers", default=default, least=0)

    def _hybrid_types(self, layers: int) -> list[str]:
        f = self._f
        if self._type in PURE_STATE:
            return ["linear_attention"] * layers
        if self._type == "falcon_h1":
            return ["hybrid"] * layers
        other = "conv" if self._type.startswith("lfm") else "linear_attention"
        for name in ("attn_layer_indices", "full_attn_idxs"):
            if (indices := f.ints(name)) is not None:
                self._check_layers(name, indices)
                return ["full_attention" if i in indices else other for i in range(layers)]
        if (hybrid := f.ints("hybrid_layer_ids")) is not None:
            self._check_layers("hybrid_layer_ids", hybrid)
            return ["hybrid" if i in hybrid else other for i in range(layers)]
        if self._type == "jamba":
            period = f.int("attn_layer_period")
            offset = f.int("attn_layer_offset", least=0, most=period - 1)
            return ["full_attention" if i % period == offset else other for i in range(layers)]
        period = f.int("full_attention_interval", "layer_group_size", default=STATE_PERIOD.get(self._type, 0), least=0)
        if not period:
            raise f.error("layer_types", "is missing: which layers have attention is not said")
        return ["full_attention" if (i + 1) % period == 0 else other for i in range(layers)]

    def _word(self, name: str) -> str:
        word = _TYPE_WORDS.get(name)
        if word is None:
            raise self._f.error("layer_types", f"names a layer of type {name!r}, which is not known")
        return CONV if word == STATE and self._type.startswith("lfm") else word

    def _attention(self, layer: int, word: str) -> list[TensorLayout]:
        kv = self._types.kv
        if self._is_mla():
            f = self._f
            rows = [("k", (1, f.int("kv_lora_rank"))), ("v", (1, f.int("qk_rope_head_dim")))]
            found = [TensorLayout(layer, name, TensorKind.LATENT, kv, shape) for name, shape in rows]
            if self._has_indexer(layer):
                found.append(TensorLayout(layer, "index", TensorKind.LATENT, kv, (f.int("index_head_dim"),)))
            return found
        kind, window = TensorKind.FULL, 0
        if word == WINDOW:
            kind = TensorKind.WINDOW
            window = self._window()
        heads, key, value = self._heads(self._f.of_layer(layer), word)
        return [
            TensorLayout(layer, "k", kind, kv, (heads, key), window),
            TensorLayout(layer, "v", kind, kv, (heads, value), window),
        ]

    def _is_mla(self) -> bool:
        f = self._f
        latent, rotary = f.has("kv_lora_rank"), f.has("qk_rope_head_dim")
        if (latent and not rotary) or (not latent and self._type in MLA_TYPES and f.flag("use_mla", default=True)):
            raise f.error("qk_rope_head_dim" if latent else "kv_lora_rank", "is missing, but layers keep latents")
        return latent

    def _has_indexer(self, layer: int) -> bool:
        """Sparse attention keeps its index keys, except in layers that use another layer's choice."""
        if not self._f.has("index_head_dim", "index_topk"):
            return False
        kinds = self._f.texts("indexer_types")
        return kinds is None or layer >= len(kinds) or kinds[layer] != "shared"

    def _window(self) -> int:
        """How many tokens a window keeps: it always includes the token being computed, which is not yet kept."""
        f = self._f
        if self._type == "mimo_v2_flash" and f.has("sliding_window_size"):  # counts previous tokens only
            return f.int("sliding_window_size")
        return f.int("sliding_window", "attention_window_size", "attention_chunk_size", least=2) - 1

    def _heads(self, f: Fields, word: str) -> tuple[int, int, int]:
        """(KV heads, width of a key, width of a value) of full attention or of a window."""
        query = f.int("num_attention_heads", "n_head", "num_heads", "n_heads")
        heads = f.int(*_KV_HEADS, default=query)
        if self._multi_query():
            heads = 1
        elif heads > query or query % heads:
            name = next((name for name in _KV_HEADS if f.has(name)), _KV_HEADS[0])
            raise f.error(name, f"is {heads}, which does not divide the {query} attention heads,", _HEADS_FIX)
        key = self._head_dim(f, query)
        value = f.int("v_head_dim", default=key)
        if word == WINDOW and self._type == "mimo_v2_flash":
            heads = f.int("swa_num_key_value_heads", default=2 * heads)
            key = f.int("swa_head_dim", default=key)
            value = f.int("swa_v_head_dim", default=value)
        elif word == FULL and self._type.startswith("gemma4"):
            key = value = f.int("global_head_dim", default=key)
            if f.flag("attention_k_eq_v"):
                heads = f.int("num_global_key_value_heads", default=heads)
        return heads, key, value

    def _head_dim(self, f: Fields, query: int) -> int:
        given = ("attention_head_dim",) if self._type == "zamba2" else _HEAD_DIMS
        if f.has(*given):
            return f.int(*given)
        hidden = f.int("hidden_size", "n_embd", "d_model", default=0, least=0)
        width = 2 * hidden if self._type == "zamba2" else hidden
        if not width or width % query:
            what = f"is {hidden}, which {query} attention heads do not divide" if hidden else "is missing"
            raise f.error("hidden_size", f"{what}, and there is no head_dim", "add head_dim: the width of a head")
        return width // query

    def _multi_query(self) -> bool:
        f = self._f
        if self._type == "falcon":
            return f.flag("multi_query", default=True) and not f.flag("new_decoder_architecture")
        return self._type == "gpt_bigcode" and f.flag("multi_query", default=True)

    def _states(self, layer: int, word: str) -> list[TensorLayout]:
        assert self._state is not None, "a layer with states has a reader of them"
        conv, state = self._state(self._f)
        found: list[TensorLayout] = []
        if conv is not None:
            found.append(TensorLayout(layer, "conv0", TensorKind.CONV, self._types.kv, conv))
        if state is not None and word != CONV:
            dtype = self._types.kv if self._type in STATE_AS_KV else self._types.state
            found.append(TensorLayout(layer, "recurrent0", TensorKind.RECURRENT, dtype, state))
        return found
