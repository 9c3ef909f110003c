"""KV that arrived whole and that the engine could not take over: told with the first token, as other fallbacks are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import FallbackReason
from farfill.engine.protocol import Cancellable, GenerateWork, KVSlot, PrefillStats, TokenEvent, TokenSink
from support.worker_harness import DECODE, RefusedError, TwoWorkers

LENGTH = 100
PROBLEM = "refused: its file is gone"


class Told:
    """A sink before another one, which hears that nothing of the slot was used."""

    def __init__(self, sink: TokenSink, tokens: int) -> None:
        self._sink, self._tokens = sink, tokens

    def prefilled(self, stats: PrefillStats) -> None:
        self._sink.prefilled(replace(stats, computed_tokens=self._tokens, cached_tokens=0, kv_problem=PROBLEM))

    def token(self, event: TokenEvent) -> None:
        self._sink.token(event)

    def failed(self, error: Exception) -> None:
        self._sink.failed(error)


class TakesNoKV(TwoWorkers):
    """The decode worker's engine gives up every slot that it gets."""

    def _engine(self, name: str, **options: Any) -> Any:
        engine = super()._engine(name, **options)
        if name == DECODE:
            generate = engine.generate

            def without(
                work: GenerateWork, sink: TokenSink, *, slot: KVSlot | None = None, valid_tokens: int = 0
            ) -> Cancellable:
                told = sink if slot is None else Told(sink, len(work.prompt) - 1)
                return generate(work, told, slot=slot, valid_tokens=valid_tokens)

            engine.generate = without
        return engine


async def test_it_is_a_fallback_with_its_reason(tmp_path: Path) -> None:
    async with TakesNoKV.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        ticket = two.ticket(prompt)
        _, answer = await asyncio.gather(two.prefill(prompt, ticket), two.decode(prompt, ticket))
        start = answer.start
        assert (start.prefilled_at, start.fallback) == ("local", str(FallbackReason.KV_NOT_LOADED))
        assert start.fallback_detail == PROBLEM
        assert (start.received_tokens, start.computed_tokens, start.cached_tokens) == (0, LENGTH - 1, 0)
        assert answer.tokens == two.expected(prompt)
        assert two.metric(DECODE, "farfill_worker_fallbacks_total", reason="kv_not_loaded") == 1


async def test_without_fallback_it_fails_before_the_first_token(tmp_path: Path) -> None:
    async with TakesNoKV.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        ticket = two.ticket(prompt)
        prefill = asyncio.create_task(two.prefill(prompt, ticket))
        with pytest.raises(RefusedError) as refused:
            await two.decode(prompt, ticket, allow_fallback=False)
        await prefill
        assert (refused.value.status, refused.value.body.reason) == (503, "kv_not_loaded")


async def test_what_went_wrong_first_is_what_counts(tmp_path: Path) -> None:
    async with TakesNoKV.running(tmp_path) as two:
        prompt = two.prompt(LENGTH)
        answer = await two.decode(prompt, two.ticket(prompt))
        assert (answer.start.prefilled_at, answer.start.fallback) == ("local", "transfer_timeout")
        assert answer.tokens == two.expected(prompt)
        assert two.metric(DECODE, "farfill_worker_fallbacks_total", reason="kv_not_loaded") == 0
