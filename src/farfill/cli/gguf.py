"""Turns one GGUF file into an ordinary model folder: fp32 safetensors, config, tokenizer.

Run as `python -m farfill.cli.gguf FILE FOLDER` in a process of its own, so that its memory goes away with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` into `folder`. The weights become plain float32, as every engine can load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loader leaves its quantiser on the dense model, which then refuses to be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
