"""A start-up check of what a model can do exactly: continue from chunks, from moved KV, and in a batch.

It runs the real executor on a few tokens and compares with one plain forward pass. A model that keeps state anywhere
else than in the KV we know of is refused before it serves a wrong token; one that only cannot be chunked or batched
is served without. What was found is remembered on disk for the same weights, code and libraries.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import torch
import transformers

from farfill.core.errors import ModelUnsupportedError
from farfill.engine.executor import Capabilities
from farfill.engine.torch.executor import TorchExecutor
from farfill.engine.torch.kv import TorchKV
from farfill.engine.torch.layout import new_cache
from farfill.kv.manifest import build_manifest

_log = logging.getLogger(__name__)

_TOKENS = 24
_CUT = 13
_SHORT = 5

_Logits = npt.NDArray[np.float32]


class ModelCheck:
    """Remembers what the model as loaded says, to compare with what the engine makes of it."""

    @torch.inference_mode()
    def __init__(self, net: Any) -> None:
        self._name = type(net).__name__
        vocab_size = net.get_input_embeddings().weight.shape[0]
        self._prompt = [(37 + 101 * i) % vocab_size for i in range(_TOKENS)]
        ids = torch.tensor([self._prompt], device=net.device)
        logits = net(input_ids=ids, cache=new_cache(net), use_cache=True).logits[0, -1]
        self._expected: _Logits = logits.float().cpu().numpy()
        # Chunks and batches round differently; state that went missing is far beyond that.
        self._tolerance = 0.02 if logits.dtype == torch.float32 else 0.25

    def run(self, executor: TorchExecutor) -> Capabilities:
        """What `executor` can do, which is set in it as well.

        Raises ModelUnsupportedError when it cannot decode what it prefilled, or not from moved KV.
        """
        executor.capabilities = Capabilities(merged_decode=False)
        last = self._prompt[-1]
        whole = self._prefilled(executor, _TOKENS - 1)
        moved = _move(executor, whole)
        for what, kv in (("token by token", whole.fork()), ("from moved KV", moved)):
            difference = self._difference(executor.decode([(kv, last)])[0], self._expected)
            if difference > self._tolerance:
                raise ModelUnsupportedError(
                    f"{self._name} decodes differently {what}: logits differ by {difference:.3g} of their spread"
                )
        chunks = self._prefilled(executor, _CUT, _TOKENS - 1 - _CUT)
        chunked = self._difference(executor.decode([(chunks, last)])[0], self._expected)
        executor.capabilities = Capabilities(
            chunked_prefill=chunked <= self._tolerance, merged_decode=self._can_merge(executor, whole)
        )
        if not executor.capabilities.chunked_prefill:
            _log.warning("%s cannot be prefilled in chunks: logits differ by %.3g of their spread", self._name, chunked)
        return executor.capabilities

    def _can_merge(self, executor: TorchExecutor, whole: TorchKV) -> bool:
        """Whether sequences of several lengths, an empty one among them, decode together as they do alone."""
        sequences = [whole, self._prefilled(executor, _SHORT), executor.allocate(1)]
        tokens = [self._prompt[kv.tokens] for kv in sequences]
        alone = [executor.decode([(kv.fork(), token)])[0] for kv, token in zip(sequences, tokens, strict=True)]
        executor.capabilities = replace(executor.capabilities, merged_decode=True)
        try:
            together = executor.decode(list(zip(sequences, tokens, strict=True)))
        except Exception as error:
            _log.info("%s is decoded one sequence at a time: %s", self._name, error)
            return False
        worst = max(map(self._difference, together, alone))
        if worst > self._tolerance:
            _log.info("%s is decoded one sequence at a time: in a batch, logits differ by %.3g", self._name, worst)
        return worst <= self._tolerance

    def _prefilled(self, executor: TorchExecutor, *chunks: int) -> TorchKV:
        kv = executor.allocate(_TOKENS)
        for tokens in chunks:
            executor.prefill(kv, self._prompt[kv.tokens : kv.tokens + tokens])
        return kv

    def _difference(self, logits: _Logits, expected: _Logits) -> float:
        """The largest difference over the spread of the logits; infinite when there is no number."""
        difference = float(np.abs(logits - expected).max()) / (float(self._expected.std()) or 1.0)
        return difference if np.isfinite(difference) else float("inf")


class CheckMemory:
    """Results of checks in files of `folder`, one per model, device, code and libraries."""

    def __init__(self, folder: Path, fingerprint: str, settings: Sequence[str]) -> None:
        digest = blake3.blake3(fingerprint.encode())
        versions = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability())
        digest.update(repr((*settings, *versions)).encode())
        # Whatever changes in this package may change what it can do.
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
        self._path = folder / f"{digest.hexdigest(length=16)}.json"

    def recall(self) -> Capabilities | None:
        """The result of an earlier check, None when there is none that can be read."""
        try:
            found = json.loads(self._path.read_text())
            return Capabilities(**{name: bool(found[name]) for name in asdict(Capabilities())})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, found: Capabilities) -> None:
        """Keep a result; a folder that cannot be written only costs the next start some time."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(found)))
            partial.replace(self._path)
        except OSError as error:
            _log.warning("the result of the model check could not be kept: %s", error)


def _move(executor: TorchExecutor, source: TorchKV) -> TorchKV:
    target = executor.allocate(source.tokens + 1)
    for piece in build_manifest(executor.layout, source.tokens).pieces:
        span = piece.tensor, piece.start_token, piece.end_token
        target.place(*span)[:] = source.read(*span)
    target.attach(source.tokens)
    return target
