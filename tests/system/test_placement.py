"""Long prompts are prefilled far, short ones near; headers, metrics, records and logs tell the same story."""

from __future__ import annotations

import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster

from farfill.verify.client import Answer, GatewayClient, Generation
from farfill.verify.prompts import load_corpus
from farfill.verify.scrape import Samples, Scraper, wait_until


@pytest.mark.parametrize(
    ("tokens", "placement", "reason"), [(600, "remote", "above_threshold"), (120, "local", "below_threshold")]
)
async def test_placement_by_length_is_told_alike_everywhere(
    real_cluster: Cluster, tokens: int, placement: str, reason: str
) -> None:
    async with real_cluster.tools() as (client, scraping):
        prompt = (await load_corpus(client)).prompt_of(tokens, variant=1)
        before = await _scrape(scraping)
        answer = await client.complete(Generation(prompt=prompt, max_tokens=4, salt=f"placement-{tokens}"))
        assert (answer.placement, answer.reason, answer.fallback) == (placement, reason, "")
        await _check_record(client, answer, tokens, placement)
        await wait_until(
            lambda: real_cluster.events("gateway", "request")[-1]["request_id"] == answer.request_id, "logged", 10.0
        )
        after = await _scrape(scraping)
    _check_log(real_cluster, answer, tokens, placement, reason)
    _check_metrics(before, after, tokens, placement, reason)


async def _scrape(scraping: Scraper) -> dict[str, Samples]:
    return {
        "gateway": await scraping.gateway(),
        DECODE: await scraping.worker(DECODE),
        PREFILL: await scraping.worker(PREFILL),
    }


async def _check_record(client: GatewayClient, answer: Answer, tokens: int, placement: str) -> None:
    record = await client.record(answer.request_id)
    assert (record.outcome, record.placed, record.placement) == ("ok", placement, placement)
    assert record.prompt_tokens == tokens
    assert record.start is not None
    if placement == "local":
        assert record.prefill is None
        assert (record.start.computed_tokens, record.start.raw_bytes) == (tokens - 1, 0)
        return
    assert record.prefill is not None
    assert record.prefill.computed_tokens == tokens - 1
    assert record.start.received_tokens == tokens - 1
    assert record.start.raw_bytes == record.prefill.raw_bytes > 0
    # What came after prefill ended is less than the whole transfer: KV travelled while prefill computed.
    assert record.prefill.after_prefill_s < record.prefill.transfer_s


def _check_log(cluster: Cluster, answer: Answer, tokens: int, placement: str, reason: str) -> None:
    line = cluster.events("gateway", "request")[-1]
    assert (line["placement"], line["reason"], line["fallback"]) == (placement, reason, "none")
    assert line["prompt_tokens"] == tokens
    served = [e for e in cluster.events(PREFILL, "prefill_served") if e["request_id"] == answer.request_id]
    assert len(served) == (1 if placement == "remote" else 0)


def _check_metrics(
    before: dict[str, Samples], after: dict[str, Samples], tokens: int, placement: str, reason: str
) -> None:
    def grown(member: str, name: str, **labels: str) -> float:
        assert after[member].has(name), f"{member} has no {name}"
        return after[member].total(name, **labels) - before[member].total(name, **labels)

    assert grown("gateway", "farfill_requests_total", placement=placement, reason=reason, outcome="ok") == 1
    assert grown("gateway", "farfill_requests_total") == 1
    assert grown("gateway", "farfill_tokens_total", kind="prompt") == tokens
    assert grown("gateway", "farfill_ttft_seconds_count", placement=placement) == 1
    far = 1 if placement == "remote" else 0
    assert grown(PREFILL, "farfill_prefill_tokens_total", source="computed") == far * (tokens - 1)
    assert grown(PREFILL, "farfill_transfers_total", outcome="ok") == far
    assert grown(DECODE, "farfill_transfers_total", outcome="ok") == far
    assert grown(DECODE, "farfill_transfer_raw_bytes_total") == grown(PREFILL, "farfill_transfer_raw_bytes_total")
    assert (grown(DECODE, "farfill_transfer_raw_bytes_total") > 0) == bool(far)
    assert grown("gateway", "farfill_remote_prefills_total", outcome="ok") == far
