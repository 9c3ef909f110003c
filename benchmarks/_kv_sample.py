"""Cache tensors of models, to measure codecs on: rows of real models over English text, states of a seeded one.

The numbers are computed in float32 once and rounded to each dtype. No linear model with trained weights is small enough
to come with the tests, so states are those of random weights: their size and dtype are right, their distribution is
a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from _transfer_layout import english_text
from farfill.core.layout import TensorKind, TensorLayout

PROMPT_TOKENS = 2048
DTYPES = ("bfloat16", "float16", "float32")
MODELS = ("smollm2", "gemma3")


@dataclass(frozen=True)
class KVSample:
    """Tensors of one kind of one model, as float32 numbers in the order a piece has them."""

    model: str
    kind: TensorKind
    row_shape: tuple[int, ...]
    numbers: list[np.ndarray]

    def layout(self, dtype: str) -> TensorLayout:
        """How one of them would be described."""
        return TensorLayout(0, "sample", self.kind, dtype, self.row_shape, 1)

    def pieces(self, dtype: str) -> list[memoryview]:
        """Their bytes in `dtype`."""
        return [memoryview(as_bytes(numbers, dtype)) for numbers in self.numbers]


def as_bytes(numbers: np.ndarray, dtype: str) -> bytes:
    """float32 numbers rounded to `dtype`."""
    if dtype == "bfloat16":
        import torch

        return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    return numbers.astype(dtype).tobytes()


def kv_samples() -> Iterator[KVSample]:
    """One sample per model and kind of tensor."""
    for model in MODELS:
        yield from _of_rows(model)
    yield from _of_states()


def _of_rows(name: str) -> Iterator[KVSample]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from farfill.cli.model_store import find_source, model_folder

    folder = model_folder(find_source(name))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(english_text(), verbose=False)["input_ids"][:PROMPT_TOKENS]
    with torch.inference_mode():
        cache = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values
    found: dict[TensorKind, list[np.ndarray]] = {}
    for layer in cache.layers:
        kind = TensorKind.WINDOW if layer.is_sliding else TensorKind.FULL
        for tensor in (layer.keys, layer.values):  # 1, heads, tokens, width
            found.setdefault(kind, []).append(tensor[0].permute(1, 0, 2).contiguous().numpy())
    for kind, numbers in found.items():
        yield KVSample(name, kind, numbers[0].shape[1:], numbers)


def _of_states() -> Iterator[KVSample]:
    """Gated delta net of a Qwen3-Next with random weights."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        linear_num_value_heads=8,
        linear_num_key_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(config).eval()
    with torch.inference_mode():
        cache = model(torch.randint(0, 1024, (1, 512)), use_cache=True).past_key_values
    states: list[np.ndarray] = []
    inputs: list[np.ndarray] = []
    for layer in cache.layers:
        if not hasattr(layer, "recurrent_states"):
            continue
        states.append(_first(layer.recurrent_states))
        inputs.append(_first(layer.conv_states))
    yield KVSample("qwen3-next-seeded", TensorKind.RECURRENT, states[0].shape, states)
    yield KVSample("qwen3-next-seeded", TensorKind.CONV, inputs[0].shape, inputs)


def _first(states: Any) -> np.ndarray:
    """The first state of a layer, of the only sequence."""
    return states[0][0].float().contiguous().numpy()
