"""A start-up check that a model's KV can be computed in chunks, moved as bytes, and decoded in a batch.

It runs the real executor on a few tokens and compares with one plain forward pass: a model that keeps state
anywhere else than in the KV we know of is refused before it serves a wrong token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from farfill.core.errors import ModelUnsupportedError
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.kv import TorchKV
from farfill.kv.manifest import build_manifest

_TOKENS = 24
_CUT = 13


@torch.inference_mode()
def check_model(net: Any, executor: TorchExecutor, config: Any) -> None:
    """Raise ModelUnsupportedError when decoding from moved KV differs from a plain forward pass."""
    prompt = [(37 + 101 * i) % config.vocab_size for i in range(_TOKENS)]
    expected = _plain_logits(net, prompt)
    first = executor.allocate(_TOKENS)
    executor.prefill(first, prompt[:_CUT])
    executor.prefill(first, prompt[_CUT:-1])
    moved = _move(executor, first, len(prompt) - 1)
    decoded = executor.decode([(first, prompt[-1]), (moved, prompt[-1])])
    # Chunks and batches round differently; state that went missing is far beyond that.
    tolerance = 0.02 if next(net.parameters()).dtype == torch.float32 else 0.25
    scale = float(expected.std()) or 1.0
    for what, logits in (("in chunks", decoded[0]), ("from moved KV", decoded[1])):
        difference = float(np.abs(logits - expected).max()) / scale
        if not difference <= tolerance:
            raise ModelUnsupportedError(
                f"{type(net).__name__} decodes differently {what}: logits differ by {difference:.3g} of their spread"
            )


def _plain_logits(net: Any, prompt: list[int]) -> np.ndarray:
    cache = DynamicCache(config=net.config.get_text_config())
    ids = torch.tensor([prompt], device=net.device)
    logits = net(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits.float().cpu().numpy()


def _move(executor: TorchExecutor, source: TorchKV, tokens: int) -> TorchKV:
    target = executor.allocate(tokens + 1)
    for piece in build_manifest(executor.layout, tokens).pieces:
        span = piece.tensor, piece.start_token, piece.end_token
        target.place(*span)[:] = source.read(*span)
    target.attach(tokens)
    return target
