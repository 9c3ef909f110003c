"""A client that goes away frees everything, in whatever phase its request is. (While KV is awaited: test_fallback.)"""

from __future__ import annotations

import asyncio

import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster
from tests.system.streams import receive

from farfill.verify.client import ForcedPlacement, Generation
from farfill.verify.prompts import load_corpus
from farfill.verify.scrape import Samples, Scraper, wait_until

DEADLINE_S = 20.0
LONG_TOKENS = 5_000


@pytest.mark.parametrize(("forced", "busy"), [("local", DECODE), ("remote", PREFILL)])
async def test_client_gone_during_prefill_stops_it_within_a_chunk(
    real_cluster: Cluster, forced: ForcedPlacement, busy: str
) -> None:
    async with real_cluster.tools() as (client, scraping):
        prompt = (await load_corpus(client)).prompt_of(LONG_TOKENS, 30)
        before = await scraping.worker(busy)
        request = asyncio.create_task(
            receive(client, Generation(prompt=prompt, max_tokens=4, salt=f"gone-{forced}", forced=forced))
        )
        await wait_until(lambda: _is_running(scraping, busy), f"{busy} prefills", DEADLINE_S)
        await wait_until(lambda: _holds_kv(scraping), "decode holds the prompt's KV", DEADLINE_S)
        request.cancel()
        await asyncio.wait([request])
        await scraping.wait_idle(deadline_s=DEADLINE_S)
        after = await scraping.worker(busy)
        computed = "farfill_prefill_tokens_total"
        # A prompt counts when its prefill is done: this one never was.
        assert after.total(computed, source="computed") == before.total(computed, source="computed")
        await _check_counted_as_cancelled(real_cluster, scraping)


async def test_client_gone_in_mid_stream_stops_decode(real_cluster: Cluster) -> None:
    async with real_cluster.tools() as (client, scraping):
        prompt = (await load_corpus(client)).prompt_of(16, 31)
        cancelled = _cancelled(await scraping.worker(DECODE))
        generation = Generation(prompt=prompt, max_tokens=4_000, salt="gone-streaming")
        async with client.stream(generation, request_id="gone-streaming") as answer:
            tokens = 0
            async for _, token_ids in answer.events():
                tokens += len(token_ids)
                if tokens >= 3 and await _holds_kv(scraping):
                    break
        await scraping.wait_idle(DECODE, deadline_s=DEADLINE_S)
        assert _cancelled(await scraping.worker(DECODE)) == cancelled + 1
        record = await client.record("gone-streaming")
        assert record.outcome == "cancelled"
        assert 3 <= record.completion_tokens < 4_000
        await _check_counted_as_cancelled(real_cluster, scraping)


async def _is_running(scraping: Scraper, name: str) -> bool:
    return (await scraping.worker(name)).total("farfill_running_sequences") > 0


async def _holds_kv(scraping: Scraper) -> bool:
    return (await scraping.worker(DECODE)).total("farfill_kv_used_bytes") > 0


def _cancelled(samples: Samples) -> float:
    return samples.total("farfill_worker_requests_total", outcome="cancelled")


async def _check_counted_as_cancelled(cluster: Cluster, scraping: Scraper) -> None:
    """The gateway has nothing in flight and its last request is `cancelled` in metrics and log."""
    gateway = await scraping.gateway()
    assert gateway.total("farfill_requests_in_flight") == 0
    assert gateway.total("farfill_requests_total", outcome="cancelled") >= 1
    assert cluster.events("gateway", "request")[-1]["outcome"] == "cancelled"
