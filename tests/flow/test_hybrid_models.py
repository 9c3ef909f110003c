"""Hybrid models through both workers: their windows, states and latents cross a real transfer over TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farfill.engine.limits import EngineLimits
from farfill.engine.local import LocalEngine
from support.architectures import save_model
from support.decode_side import load
from support.transfer_harness import FINGERPRINT
from support.worker_harness import CHUNK, TwoWorkers

LENGTH = 4 * CHUNK + 9
MAX_TOKENS = 16


class HybridWorkers(TwoWorkers):
    """Two workers that run the model in `model`, each with weights of its own."""

    def _engine(self, name: str, **options: Any) -> Any:
        loaded = load(options["model"], CHUNK)
        info = replace(loaded.info, fingerprint=FINGERPRINT, kv_total_bytes=1 << 26)
        limits = EngineLimits(max_batch=8, max_queue=16, prefix_cache_bytes=0)
        return LocalEngine(info, loaded.executor, loaded.vocabulary, limits)


@contextlib.asynccontextmanager
async def workers(architecture: str, folder: Path) -> AsyncIterator[HybridWorkers]:
    torch.set_num_threads(1)
    save_model(architecture, folder / "model")
    async with HybridWorkers.running(folder, far_fingerprint=FINGERPRINT, model=folder / "model") as two:
        assert isinstance(two, HybridWorkers)
        yield two


@pytest.mark.parametrize("architecture", ["falcon_h1", "lfm3", "kimi_linear", "llama4", "minimax", "gemma3n"])
async def test_far_prefill_gives_the_tokens_of_local_prefill(tmp_path: Path, architecture: str) -> None:
    async with workers(architecture, tmp_path) as two:
        prompt = two.prompt(LENGTH)
        expected = await asyncio.to_thread(two.expected, prompt, MAX_TOKENS)
        ticket = two.ticket(prompt)
        report, answer = await asyncio.gather(
            two.prefill(prompt, ticket, timeout_s=20.0),
            two.decode(prompt, ticket, max_tokens=MAX_TOKENS, timeout_s=20.0),
        )
        assert answer.tokens == expected
        assert answer.start.prefilled_at == "remote"
        assert answer.start.received_tokens == report.computed_tokens == LENGTH - 1
        assert answer.start.raw_bytes == two.decode_engine.info.layout.bytes_per_token * (LENGTH - 1) + sum(
            tensor.row_bytes * min(tensor.window_tokens or 1, LENGTH - 1)
            for tensor in two.decode_engine.info.layout.tensors
            if not tensor.kind.grows
        )
