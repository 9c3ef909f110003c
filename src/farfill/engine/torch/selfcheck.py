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


class ModelCheck:
    """Remembers what the model as loaded says, to compare with what the engine makes of it."""

    @torch.inference_mode()
    def __init__(self, net: Any) -> None:
        config = net.config.get_text_config()
        self._name = type(net).__name__
        self._prompt = [(37 + 101 * i) % config.vocab_size for i in range(_TOKENS)]
        ids = torch.tensor([self._prompt], device=net.device)
        logits = net(input_ids=ids, cache=DynamicCache(config=config), use_cache=True, logits_to_keep=1).logits[0, -1]
        self._expected = logits.float().cpu().numpy()
        # Chunks and batches round differently; state that went missing is far beyond that.
        self._tolerance = 0.02 if logits.dtype == torch.float32 else 0.25

    def run(self, executor: TorchExecutor) -> None:
        """Raise ModelUnsupportedError when decoding after chunks, or from moved KV, differs from the plain model."""
        prompt = self._prompt
        first = executor.allocate(_TOKENS)
        executor.prefill(first, prompt[:_CUT])
        executor.prefill(first, prompt[_CUT:-1])
        moved = _move(executor, first, len(prompt) - 1)
        decoded = executor.decode([(first, prompt[-1]), (moved, prompt[-1])])
        scale = float(self._expected.std()) or 1.0
        for what, logits in (("in chunks", decoded[0]), ("from moved KV", decoded[1])):
            difference = float(np.abs(logits - self._expected).max()) / scale
            if not difference <= self._tolerance:
                raise ModelUnsupportedError(
                    f"{self._name} decodes differently {what}: logits differ by {difference:.3g} of their spread"
                )


def _move(executor: TorchExecutor, source: TorchKV, tokens: int) -> TorchKV:
    target = executor.allocate(tokens + 1)
    for piece in build_manifest(executor.layout, tokens).pieces:
        span = piece.tensor, piece.start_token, piece.end_token
        target.place(*span)[:] = source.read(*span)
    target.attach(tokens)
    return target
