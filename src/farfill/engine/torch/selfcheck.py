"""A start-up check of what a model can do exactly: continue from chunks, from moved KV, and in a batch.

It runs the real executor on a few tokens and compares with one plain forward pass. A model that keeps state anywhere
else than in the KV we know of is refused before it serves a wrong token; one that only cannot be chunked or batched
is served another way. What was found is remembered on disk for the same weights, code and libraries.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import blake3
import numba
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
_MOVED_TOLERANCE = 0.002

_Logits = npt.NDArray[np.float32]


class ModelCheck:
    """Remembers what the model as loaded says, to compare with what the engine makes of it."""

    @torch.inference_mode()
    def __init__(self, net: Any) -> None:
        self._name = type(net).__name__
        self._remarks: list[str] = []
        vocab_size = net.get_input_embeddings().weight.shape[0]
        self._prompt = [(37 + 101 * i) % vocab_size for i in range(_TOKENS)]
        ids = torch.tensor([self._prompt], device=net.device)
        logits = net(input_ids=ids, cache=new_cache(net), use_cache=True).logits[0, -1]
        self._expected: _Logits = logits.float().cpu().numpy()
        # Chunks and batches round differently. Models blow that up on their way to the logits: in bfloat16, SmolLM2's
        # are off by 0.02 to 0.21 from prompt to prompt, with plain torch by up to 0.16; by 0.24 to 0.54 when the KV of
        # one layer went missing, which is looked for in the KV itself, and by 3 when all of it did.
        single = net.dtype == torch.float32
        self._kv_tolerance, self._logits_tolerance = (0.002, 0.002) if single else (0.1, 0.4)

    def run(self, executor: TorchExecutor) -> Capabilities:
        """What `executor` can do, which is set in it as well.

        Raises ModelUnsupportedError when it cannot decode what it prefilled, or not from moved KV.
        """
        executor.capabilities = Capabilities(merged_decode=False)
        whole = self._prefilled(executor, _TOKENS - 1)
        own = self._decoded(executor, whole.fork())
        self._require("token by token", own, self._expected, self._logits_tolerance)
        # The same steps over the same numbers: nothing rounds differently.
        self._require("from moved KV", self._decoded(executor, _move(executor, whole)), own, _MOVED_TOLERANCE)
        executor.capabilities = found = Capabilities(
            chunked_prefill=self._can_chunk(executor, whole), merged_decode=self._can_merge(executor, whole)
        )
        executor.capabilities = replace(found, remarks=tuple(self._remarks))
        return executor.capabilities

    def _can_chunk(self, executor: TorchExecutor, whole: TorchKV) -> bool:
        """Whether a second prefill chunk may be computed at once: it then leaves the KV that one chunk does."""
        cuts = (_CUT, _TOKENS - 1 - _CUT)
        difference = self._kv_difference(whole, self._prefilled(executor, *cuts))
        if difference <= self._kv_tolerance:
            return True
        self._remark(
            "is prefilled token by token after the first chunk: at once, "
            f"its KV differs by {difference:.3g} of its size"
        )
        executor.capabilities = replace(executor.capabilities, chunked_prefill=False)
        chunks = self._prefilled(executor, *cuts)
        difference = self._kv_difference(whole, chunks)
        if difference > self._kv_tolerance:
            raise ModelUnsupportedError(
                f"{self._name} cannot continue a prompt: its KV differs by {difference:.3g} of its size"
            )
        return False

    @staticmethod
    def _kv_difference(expected: TorchKV, found: TorchKV) -> float:
        """The length of the difference over that of the tensor, of the tensor that differs most.

        A state that was lost may hardly show in the logits of a few tokens; here it does.
        """
        worst = 0.0
        for index, tensor in enumerate(expected.spec.layout.tensors):
            span = expected.spec.layout.kept_span(index, expected.tokens)
            start, end = (0, expected.tokens) if tensor.kind.grows else span
            a, b = (
                torch.frombuffer(bytearray(kv.read(index, start, end)), dtype=getattr(torch, tensor.dtype)).float()
                for kv in (expected, found)
            )
            difference = float((a - b).norm() / a.norm().clamp(min=1e-6))
            worst = max(worst, difference if np.isfinite(difference) else float("inf"))
        return worst

    def _can_merge(self, executor: TorchExecutor, whole: TorchKV) -> bool:
        """Whether sequences of several lengths, an empty one among them, decode together as they do alone."""
        sequences = [whole, self._prefilled(executor, _SHORT), executor.allocate(1)]
        tokens = [self._prompt[kv.tokens] for kv in sequences]
        alone = [executor.decode([(kv.fork(), token)])[0] for kv, token in zip(sequences, tokens, strict=True)]
        executor.capabilities = replace(executor.capabilities, merged_decode=True)
        try:
            together = executor.decode(list(zip(sequences, tokens, strict=True)))
        except Exception as error:
            self._remark(f"is decoded one sequence at a time: {error}")
            return False
        worst = max(map(self._difference, together, alone))
        if worst > self._logits_tolerance:
            self._remark(f"is decoded one sequence at a time: in a batch, logits differ by {worst:.3g} of their spread")
        return worst <= self._logits_tolerance

    def _remark(self, what: str) -> None:
        """Tell of something that costs speed, now and at every later start."""
        self._remarks.append(f"{self._name} {what}")
        _log.warning("%s", self._remarks[-1])

    def _require(self, what: str, found: _Logits, expected: _Logits, tolerance: float) -> None:
        difference = self._difference(found, expected)
        if difference > tolerance:
            raise ModelUnsupportedError(
                f"{self._name} decodes differently {what}: logits differ by {difference:.3g} of their spread"
            )

    def _decoded(self, executor: TorchExecutor, kv: TorchKV) -> _Logits:
        """The logits after the last token."""
        return executor.decode([(kv, self._prompt[-1])])[0]

    def _prefilled(self, executor: TorchExecutor, *chunks: int) -> TorchKV:
        kv = executor.allocate(_TOKENS)
        for tokens in chunks:
            executor.prefill(kv, self._prompt[kv.tokens : kv.tokens + tokens])
        return kv

    def _difference(self, logits: _Logits, expected: _Logits) -> float:
        """The usual difference over the spread of the logits; infinite when there is no number."""
        difference = float(np.sqrt(np.square(logits - expected).mean())) / (float(self._expected.std()) or 1.0)
        return difference if np.isfinite(difference) else float("inf")


class CheckMemory:
    """Results of checks in files of `folder`, one per model, device, code and libraries."""

    def __init__(self, folder: Path, fingerprint: str, settings: Sequence[str]) -> None:
        digest = blake3.blake3(fingerprint.encode())
        versions = (
            torch.__version__,
            transformers.__version__,
            numba.__version__,
            torch.backends.cpu.get_cpu_capability(),
        )
        digest.update(repr((*settings, *versions)).encode())
        # Whatever changes in this package may change what it can do.
        for source in sorted(Path(__file__).parent.rglob("*.py")):
            digest.update(source.read_bytes())
        self._path = folder / f"{digest.hexdigest(length=16)}.json"

    def recall(self) -> Capabilities | None:
        """The result of an earlier check, whose remarks are logged again; None when there is none that can be read."""
        try:
            kept = json.loads(self._path.read_text())
            remarks = tuple(str(remark) for remark in kept["remarks"])
            found = Capabilities(bool(kept["chunked_prefill"]), bool(kept["merged_decode"]), remarks)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for remark in remarks:
            _log.warning("%s (found by an earlier check)", remark)
        return found

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
