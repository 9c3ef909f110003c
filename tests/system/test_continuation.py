"""Far workers at two sites: one dies in the middle of a transfer, the other brings the rest, and no client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster, local_plan, running
from tests.system.models import write_full_attention
from tests.system.streams import Received, receive

from farfill.cli.local_ports import HOST, free_ports
from farfill.testing.relay import Relay
from farfill.verify.client import GatewayClient, Generation
from farfill.verify.prompts import load_corpus

OTHER = "prefill-other"
FAULTS = Path(__file__).parent / "faults"
PROMPT_TOKENS = 3_000  # 3 MB of KV
CHUNK_TOKENS = 64
SLOW_BYTES_PER_S = 1_500_000
MIDDLE_BYTES = 1_000_000
EARLY_BYTES = 100_000
DEADLINE_S = 30.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A decode worker and far workers at two sites, whose KV passes a port where the test puts a relay.

    One for each test: a gateway that has seen a site fail prefers the other one.
    """
    folder = tmp_path_factory.mktemp("continued")
    (port,) = free_ports(1)
    other = {OTHER: {"role": "prefill", "site": "other", "listen": f"{HOST}:{port}"}}
    plan = local_plan(
        write_full_attention(folder / "model"), "full", timeout_ms=1_500, overrides={"workers": other}
    )  # fmt: skip
    with running(plan, folder, relayed=True) as started:
        yield started


@pytest.fixture
def relay(cluster: Cluster) -> Iterator[Relay]:
    """The way from far to near, slow enough that a transfer has a middle."""
    with Relay(
        cluster.kv_address, listen=f"{HOST}:{cluster.kv_relay_port}", rate_bytes_per_s=SLOW_BYTES_PER_S
    ) as relay:
        yield relay


async def test_frozen_far_worker_is_continued_and_what_it_sends_later_never_lands(
    cluster: Cluster, relay: Relay
) -> None:
    async with cluster.tools() as (client, scraping):
        try:
            # Early, for what the relay's queue has taken arrives in spite of it.
            received = await _with_fault(
                client, relay, lambda: cluster.signal(PREFILL, signal.SIGSTOP), "frozen", after_bytes=EARLY_BYTES
            )
        finally:
            cluster.signal(PREFILL, signal.SIGCONT)
        _check_continued(received, "transfer_timeout", "link_lost")
        await _check_same_tokens_as_local(client, received, "frozen")
        # It goes on where it stood; nothing of that may reach anybody's memory, and nothing may stay behind.
        await scraping.wait_idle(deadline_s=DEADLINE_S)
        after = await client.complete(await _generation(client, "frozen", salt="frozen-after"))
        assert tuple(received.token_ids) == after.token_ids


async def test_far_worker_killed_in_the_middle_is_continued_by_another_site(cluster: Cluster, relay: Relay) -> None:
    async with cluster.tools() as (client, scraping):
        before = await scraping.gateway(), await scraping.worker(DECODE)
        received = await _with_fault(client, relay, lambda: cluster.kill(PREFILL), "killed")
        # Its connections to gateway and decode break at the same moment; whichever is noticed first is the reason.
        _check_continued(received, "prefill_lost", "link_lost")
        await _check_same_tokens_as_local(client, received, "killed")
        after = await scraping.gateway(), await scraping.worker(DECODE)

        def counted(name: str, **labels: str) -> float:
            return sum(b.total(name, **labels) - a.total(name, **labels) for a, b in zip(before, after, strict=True))

        assert received.record is not None
        assert received.record.start is not None
        assert counted("farfill_continuations_total", outcome="ok") == 1
        assert counted("farfill_fallbacks_total") == 0
        assert counted("farfill_transfers_total", outcome="continued") == 1
        assert counted("farfill_reused_bytes_total") == received.record.start.reused_bytes
        await scraping.wait_idle(DECODE, OTHER, deadline_s=DEADLINE_S)
        line = cluster.events("gateway", "request")[-2]  # the last one is the local run it was compared with
        assert (line["placement"], line["prefill"], line["request_id"]) == ("remote", OTHER, received.request_id)
        assert len(line["continued"]) == 1


async def test_flipped_bits_are_found_and_only_those_chunks_travel_again(cluster: Cluster, relay: Relay) -> None:
    """The sender's process damages every third chunk after it was hashed, inside the encryption."""
    relay.set_rate(None)
    path = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with contextlib.suppress(KeyError):  # when it is still there
        cluster.stop(PREFILL)
    await cluster.respawn(PREFILL, environment={"PYTHONPATH": path})
    async with cluster.tools() as (client, scraping):
        before = (await scraping.worker(DECODE)).total("farfill_chunks_resent_total", reason="checksum")
        received = await receive(client, await _generation(client, "flipped"))
        assert (received.placement, received.fallback) == ("remote", "")
        await _check_same_tokens_as_local(client, received, "flipped")
        resent = (await scraping.worker(DECODE)).total("farfill_chunks_resent_total", reason="checksum") - before
        assert received.record is not None
        report = received.record.prefill
        assert report is not None
        assert received.record.prefill_instance == PREFILL
        assert resent == report.resent_chunks == report.chunks // 3 > 0
        assert len(report.retries) == min(64, report.resent_chunks)
        assert {retry.reason for retry in report.retries} == {"checksum"}
        sender = await scraping.worker(PREFILL)
        assert sender.total("farfill_chunks_resent_total", reason="checksum") == resent
        await scraping.wait_idle(deadline_s=DEADLINE_S)


async def _generation(client: GatewayClient, text: str, salt: str = "") -> Generation:
    """A prompt of its own for each `text`, forced far."""
    corpus = await load_corpus(client)
    prompt = corpus.prompt_of(PROMPT_TOKENS, len(text) * 7 + ord(text[0]))
    return Generation(prompt=prompt, max_tokens=16, salt=salt or text, forced="remote")


async def _with_fault(
    client: GatewayClient, relay: Relay, fault: Callable[[], object], text: str, *, after_bytes: int = MIDDLE_BYTES
) -> Received:
    """Ask for far prefill; `fault` strikes when so much of the KV has passed."""
    request = asyncio.create_task(receive(client, await _generation(client, text)))
    async with asyncio.timeout(DEADLINE_S):
        while relay.up.bytes < after_bytes:
            await asyncio.sleep(0.002)
    assert not request.done()
    fault()
    return await asyncio.wait_for(request, DEADLINE_S)


def _check_continued(received: Received, *reasons: str) -> None:
    """The other site finished it, and sent only what had not arrived."""
    assert (received.placement, received.fallback) == ("remote", "")
    record = received.record
    assert record is not None
    (step,) = record.continuations
    assert (step.failed_instance, step.prefill_instance, step.outcome) == (PREFILL, OTHER, "ok")
    assert step.reason in reasons
    assert (record.prefill_instance, record.prefill_site) == (OTHER, "other")
    start, report = record.start, record.prefill
    assert start is not None
    assert report is not None
    total = start.reused_bytes + report.raw_bytes
    assert start.reused_bytes == step.held_bytes > 0
    assert total == (PROMPT_TOKENS - 1) * (total // (PROMPT_TOKENS - 1)), "whole tokens, none twice"
    assert report.raw_bytes < total
    assert (start.continuations, start.received_tokens) == (1, PROMPT_TOKENS - 1)
    assert start.computed_tokens == 0


async def _check_same_tokens_as_local(client: GatewayClient, received: Received, text: str) -> None:
    wanted = await _generation(client, text)
    local = await client.complete(
        Generation(prompt=wanted.prompt, max_tokens=wanted.max_tokens, salt=f"{text}-clean", forced="local")
    )
    assert (local.placement, local.fallback) == ("local", "")
    assert tuple(received.token_ids) == local.token_ids
    assert len(local.token_ids) == wanted.max_tokens
