"""The caches that transfer benchmarks move: layouts by name, and the bytes of a real one."""

from __future__ import annotations

import os
from pathlib import Path

from farfill.core.layout import KVLayout, TensorKind, TensorLayout

FINGERPRINT = "b" * 64
PREFILL_CHUNK_TOKENS = 2048
_CACHE_ENV = "XDG_CACHE_HOME"


def layout_of(name: str) -> KVLayout:
    """`8b`: 32 layers of 8 heads of 128, as Llama 3 8B (131072 bytes a token); `smollm2`: SmolLM2-135M (23040)."""
    layers, heads, width = {"8b": (32, 8, 128), "smollm2": (30, 3, 64)}[name]
    tensors = [
        TensorLayout(layer, part, TensorKind.FULL, "bfloat16", (heads, width))
        for layer in range(layers)
        for part in ("k", "v")
    ]
    return KVLayout(tuple(tensors), prefill_chunk_tokens=PREFILL_CHUNK_TOKENS)


def tokens_for(layout: KVLayout, nbytes: int) -> int:
    """Tokens whose cache has about `nbytes`."""
    return max(1, round(nbytes / layout.bytes_per_token))


def cache_folder() -> Path:
    """Where benchmarks keep what is costly to make."""
    home = os.environ.get(_CACHE_ENV)
    return (Path(home) if home else Path.home() / ".cache") / "farfill"


def real_kv(num_chunks: int) -> Path:
    """A file with the bf16 KV of SmolLM2 over English text, `num_chunks` prefill chunks in manifest order.

    Each chunk is a prompt of its own. Made once, with torch; the model is that of `farfill model fetch smollm2`.
    """
    path = cache_folder() / "bench" / f"kv-smollm2-{num_chunks}x{PREFILL_CHUNK_TOKENS}.bin"
    if path.exists():
        return path
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from farfill.cli.model_store import find_source, model_folder

    folder = model_folder(find_source("smollm2"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = AutoTokenizer.from_pretrained(folder)(english_text(), verbose=False)["input_ids"]
    assert len(ids) >= PREFILL_CHUNK_TOKENS, "the text is too short"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    with unfinished.open("wb") as file, torch.inference_mode():
        for chunk in range(num_chunks):
            start = chunk * PREFILL_CHUNK_TOKENS % (len(ids) - PREFILL_CHUNK_TOKENS + 1)
            prompt = torch.tensor([ids[start : start + PREFILL_CHUNK_TOKENS]])
            cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
            for layer in cache.layers:
                for tensor in (layer.keys, layer.values):  # 1, heads, tokens, width
                    rows = tensor[0].permute(1, 0, 2).contiguous()
                    file.write(rows.view(torch.uint8).numpy().tobytes())
    unfinished.rename(path)
    return path


def english_text() -> str:
    """Prose to compute caches of."""
    root = Path(__file__).parent.parent
    files = [root / "src/farfill/verify/corpus.txt", *sorted((root / "docs").rglob("*.md"))]
    return "\n\n".join(file.read_text() for file in files)
