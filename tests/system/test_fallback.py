"""Far prefill broken in every way: the client gets the tokens of a clean local run, and the reason has a name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import aiohttp
import pytest
from tests.system.cluster import DECODE, PREFILL, Cluster
from tests.system.streams import Received, receive

from farfill.cli.local_ports import HOST, free_ports
from farfill.testing.relay import Relay
from farfill.verify.client import FORCE_HEADER, GatewayClient, Generation
from farfill.verify.prompts import load_corpus
from farfill.verify.scrape import Scraper, wait_until

PROMPT_TOKENS = 3_000  # 3 MB of KV
CHUNK_TOKENS = 64
SLOW_BYTES_PER_S = 1_500_000
MIDDLE_BYTES = 1_000_000
DEADLINE_S = 30.0


@pytest.fixture
def relay(relayed_cluster: Cluster) -> Iterator[Relay]:
    """The link from far to near, whole and slow enough that a transfer has a middle."""
    with Relay(
        relayed_cluster.kv_address,
        listen=f"{HOST}:{relayed_cluster.kv_relay_port}",
        rate_bytes_per_s=SLOW_BYTES_PER_S,
    ) as relay:
        yield relay


async def test_link_that_works_needs_no_fallback(relayed_cluster: Cluster, relay: Relay) -> None:
    async with relayed_cluster.tools() as (client, scraping):
        received = await _remote_with_fault(client, relay, lambda: None, "control")
        assert (received.placement, received.fallback) == ("remote", "")
        await _check_same_tokens_as_local(client, received, "control")
        await scraping.wait_idle(deadline_s=DEADLINE_S)


async def test_link_cut_in_the_middle_continues_from_what_arrived(relayed_cluster: Cluster, relay: Relay) -> None:
    async with relayed_cluster.tools() as (client, scraping):
        before = await _fallbacks(scraping, "link_lost")
        received = await _remote_with_fault(client, relay, relay.cut, "cut")
        assert (received.placement, received.fallback) == ("local", "link_lost")
        _check_continued_from_a_prefix(received)
        await _check_same_tokens_as_local(client, received, "cut")
        assert await _fallbacks(scraping, "link_lost") == (before[0] + 1, before[1] + 1)
        await scraping.wait_idle(deadline_s=DEADLINE_S)


async def test_link_that_swallows_everything_is_given_up(relayed_cluster: Cluster, relay: Relay) -> None:
    async with relayed_cluster.tools() as (client, scraping):
        before = await _fallbacks(scraping, "transfer_timeout")
        received = await _remote_with_fault(client, relay, relay.blackhole, "blackhole")
        assert (received.placement, received.fallback) == ("local", "transfer_timeout")
        _check_continued_from_a_prefix(received)
        await _check_same_tokens_as_local(client, received, "blackhole")
        assert await _fallbacks(scraping, "transfer_timeout") == (before[0] + 1, before[1] + 1)
        relay.heal()
        await scraping.wait_idle(deadline_s=DEADLINE_S)


async def test_one_connection_reset_is_resumed_without_fallback(relayed_cluster: Cluster, relay: Relay) -> None:
    async with relayed_cluster.tools() as (client, scraping):
        received = await _remote_with_fault(client, relay, relay.reset_one, "reset")
        assert (received.placement, received.fallback) == ("remote", "")
        await _check_same_tokens_as_local(client, received, "reset")
        await scraping.wait_idle(deadline_s=DEADLINE_S)


async def test_far_worker_killed_in_the_middle_of_a_transfer(relayed_cluster: Cluster, relay: Relay) -> None:
    async with relayed_cluster.tools() as (client, scraping):
        try:
            received = await _remote_with_fault(client, relay, lambda: relayed_cluster.kill(PREFILL), "killed")
            assert received.placement == "local"
            # Its two kinds of connections break at the same moment; whichever is noticed first names the reason.
            assert received.fallback in ("prefill_lost", "link_lost")
            _check_continued_from_a_prefix(received)
            await _check_same_tokens_as_local(client, received, "killed")
            await scraping.wait_idle(DECODE, deadline_s=DEADLINE_S)
        finally:
            await relayed_cluster.respawn(PREFILL)


async def test_far_worker_dead_before_is_noticed_and_then_avoided(relayed_cluster: Cluster, relay: Relay) -> None:
    async with relayed_cluster.tools() as (client, scraping):
        relayed_cluster.kill(PREFILL)
        try:
            received = await receive(client, await _generation(client, "dead"))
            assert (received.placement, received.fallback) == ("local", "prefill_unreachable")
            await _check_same_tokens_as_local(client, received, "dead")
            # Once its lease has run out it is not asked any more: no fallback, another reason.
            await asyncio.to_thread(relayed_cluster.wait_known, {DECODE})
            answer = await client.complete(await _generation(client, "gone"))
            assert (answer.placement, answer.reason, answer.fallback) == ("local", "no_prefill_instance", "")
            await scraping.wait_idle(DECODE, deadline_s=DEADLINE_S)
        finally:
            await relayed_cluster.respawn(PREFILL)


async def test_far_worker_with_another_prefill_chunk_gets_no_request(relayed_cluster: Cluster, relay: Relay) -> None:
    other = relayed_cluster.write_config("other.yaml", {"prefill": {"chunked_prefill_tokens": 2 * CHUNK_TOKENS}})
    relayed_cluster.stop(PREFILL)
    await asyncio.to_thread(relayed_cluster.wait_known, {DECODE})
    relayed_cluster.spawn(PREFILL, config=other)
    try:
        await asyncio.to_thread(relayed_cluster.wait_known, {DECODE, PREFILL})
        async with relayed_cluster.client() as client:
            received = await receive(client, await _generation(client, "fingerprint"))
            assert received.record is not None
            assert (received.placement, received.record.reason) == ("local", "fingerprint_mismatch")
            await _check_same_tokens_as_local(client, received, "fingerprint")
        assert relay.up.bytes == 0
    finally:
        relayed_cluster.stop(PREFILL)
        await relayed_cluster.respawn(PREFILL)


async def test_fallback_switched_off_answers_503_with_retry_after(relayed_cluster: Cluster, relay: Relay) -> None:
    (port,) = free_ports(1)
    strict = relayed_cluster.write_config(
        "strict.yaml",
        {"gateway": {"listen": f"{HOST}:{port}"}, "routing": {"fallback_to_local_prefill": False}},
    )
    relayed_cluster.spawn("gateway-strict", config=strict, role="gateway")
    url = f"http://{HOST}:{port}"
    try:
        await asyncio.to_thread(relayed_cluster.wait_known, {DECODE, PREFILL}, url=url)
        relay.cut()
        async with relayed_cluster.tools() as (client, scraping), aiohttp.ClientSession() as session:
            prompt = (await _generation(client, "strict")).prompt
            body = {"model": (await client.model()).name, "prompt": list(prompt), "max_tokens": 4}
            async with session.post(f"{url}/v1/completions", json=body, headers={FORCE_HEADER: "remote"}) as response:
                error = (await response.json())["error"]
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert error["code"] == "link_lost"
            await scraping.wait_idle(deadline_s=DEADLINE_S)
    finally:
        relayed_cluster.stop("gateway-strict")


async def test_client_gone_while_kv_is_awaited_frees_both_sides(relayed_cluster: Cluster, relay: Relay) -> None:
    async with relayed_cluster.tools() as (client, scraping):
        before = [
            (await scraping.worker(name)).total("farfill_transfers_total", outcome="ok") for name in (DECODE, PREFILL)
        ]
        request = asyncio.create_task(receive(client, await _generation(client, "left")))
        await wait_until(lambda: relay.up.bytes > MIDDLE_BYTES, "the transfer is in its middle", DEADLINE_S)
        held = (await scraping.worker(DECODE)).total("farfill_kv_used_bytes")
        request.cancel()
        await asyncio.wait([request])
        passed = relay.up.bytes
        await scraping.wait_idle(deadline_s=DEADLINE_S)
        after = [
            (await scraping.worker(name)).total("farfill_transfers_total", outcome="ok") for name in (DECODE, PREFILL)
        ]
        assert after == before, "the transfer went on to its end"
        assert held > 0
        # What was under way in buffers may still have come; the rest was never sent.
        assert relay.up.bytes - passed < PROMPT_TOKENS * 1_024 - MIDDLE_BYTES


async def _generation(client: GatewayClient, salt: str) -> Generation:
    """A prompt of its own for each `salt`, forced far."""
    corpus = await load_corpus(client)
    return Generation(
        prompt=corpus.prompt_of(PROMPT_TOKENS, len(salt) * 7 + ord(salt[0])), max_tokens=16, salt=salt, forced="remote"
    )


async def _remote_with_fault(client: GatewayClient, relay: Relay, fault: Callable[[], object], salt: str) -> Received:
    """Ask for far prefill; `fault` strikes when a third of the KV has passed the link."""
    request = asyncio.create_task(receive(client, await _generation(client, salt)))
    await wait_until(lambda: relay.up.bytes > MIDDLE_BYTES, "the transfer is in its middle", DEADLINE_S)
    assert not request.done()
    fault()
    return await asyncio.wait_for(request, DEADLINE_S)


async def _check_same_tokens_as_local(client: GatewayClient, received: Received, salt: str) -> None:
    wanted = await _generation(client, salt)
    local = await client.complete(
        Generation(prompt=wanted.prompt, max_tokens=wanted.max_tokens, salt=f"{salt}-clean", forced="local")
    )
    assert (local.placement, local.fallback) == ("local", "")
    assert tuple(received.token_ids) == local.token_ids
    assert len(local.token_ids) == wanted.max_tokens


def _check_continued_from_a_prefix(received: Received) -> None:
    """Whole prefill chunks that had arrived were used, the rest computed, and nothing twice."""
    assert received.record is not None
    start = received.record.start
    assert start is not None
    assert start.received_tokens > 0
    assert start.received_tokens % CHUNK_TOKENS == 0
    assert start.received_tokens + start.computed_tokens == PROMPT_TOKENS - 1


async def _fallbacks(scraping: Scraper, reason: str | None) -> tuple[float, float]:
    """As gateway and decode worker count them; None: for any reason."""
    labels = {} if reason is None else {"reason": reason}
    gateway, decode = await scraping.gateway(), await scraping.worker(DECODE)
    return (
        gateway.total("farfill_fallbacks_total", **labels),
        decode.total("farfill_worker_fallbacks_total", **labels),
    )
