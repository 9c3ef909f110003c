"""What workers announce of their prefix caches decides placements: evictions, gaps, deaths, and who does not tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import Role
from farfill.core.errors import FarfillError
from farfill.engine.blocks import BlockLedger
from farfill.gateway import blocks as gateway_blocks
from farfill.gateway.observe import SilentPolicyObserver
from farfill.gateway.prefixes import PrefixView
from farfill.kv import hashing
from farfill.kv.hashing import prefix_keys
from farfill.wire.blocks import KEY_BYTES, BlocksChanged, BlocksHello, BlocksMessage, BlocksSnapshot
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker

CHUNK = 16
PROMPT = [1, *range(2, 90)]
KEYS = prefix_keys(PROMPT[:-1], CHUNK, "default:")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path, routing={"remote_prefill_threshold_tokens": 1000}) as harness:
        yield harness


async def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.005)


async def serve(gateway: Harness, request_id: str) -> tuple[str, int]:
    """(who decoded, hit the gateway counted on)."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    status, answer, response = await gateway.post("/v1/completions", body, **{"X-Request-Id": request_id})
    assert status == 200, answer
    record = await gateway.record(request_id)
    return response.headers["x-farfill-decode-instance"], record["expected_hit_tokens"]


async def add_worker(gateway: Harness, name: str, ledger: BlockLedger | None) -> StubWorker:
    worker = StubWorker(name, Role.DECODE, gateway.decode.transfers, blocks=ledger)
    await worker.start()
    gateway.membership.workers.append(worker)
    return worker


def known(gateway: Harness, name: str) -> int:
    prefixes = gateway.service.prefixes
    prefixes.follow(gateway.membership.instances())
    return prefixes.hits(KEYS).at(name)


async def test_announced_blocks_draw_prompts_and_evicted_ones_do_not(gateway: Harness) -> None:
    ledger = BlockLedger(CHUNK, sparse=False)
    worker = await add_worker(gateway, "decode-told", ledger)
    try:
        ledger.stored(KEYS)
        await until(lambda: known(gateway, "decode-told") == len(KEYS))
        assert await serve(gateway, "held") == ("decode-told", len(KEYS) * CHUNK)
        # Routing history would go on believing; what the worker drops is known within a second.
        ledger.removed(KEYS[1:])
        await until(lambda: known(gateway, "decode-told") == 1, limit_s=1.0)
        _, expected = await serve(gateway, "evicted")
        assert expected <= CHUNK
        ledger.cleared()
        await until(lambda: known(gateway, "decode-told") == 0, limit_s=1.0)
    finally:
        await worker.stop()


async def test_history_alone_believes_what_was_evicted(gateway: Harness) -> None:
    """The counterpart of the test above: without events nobody can know."""
    gateway.decode.cached_tokens = len(KEYS) * CHUNK
    assert await serve(gateway, "first") == ("decode-near", 0)
    gateway.decode.cached_tokens = 0  # evicted, and nobody says so
    assert await serve(gateway, "second") == ("decode-near", len(KEYS) * CHUNK)


async def test_other_tenants_blocks_are_no_hit(gateway: Harness) -> None:
    ledger = BlockLedger(CHUNK, sparse=False)
    worker = await add_worker(gateway, "decode-told", ledger)
    try:
        other = prefix_keys(PROMPT[:-1], CHUNK, "other:")
        ledger.stored(other)
        await until(lambda: gateway.service.prefixes.hits(other).at("decode-told") == len(other))
        assert known(gateway, "decode-told") == 0
    finally:
        await worker.stop()


async def test_dead_instance_is_dropped_and_its_next_life_starts_with_its_own_snapshot(gateway: Harness) -> None:
    ledger = BlockLedger(CHUNK, sparse=False)
    ledger.stored(KEYS)
    worker = await add_worker(gateway, "decode-told", ledger)
    await until(lambda: known(gateway, "decode-told") == len(KEYS))
    gateway.membership.workers.remove(worker)
    await until(lambda: known(gateway, "decode-told") == 0 and gateway.service.prefixes.exact == 0)
    worker.generation, worker.blocks = "2", BlockLedger(CHUNK, sparse=False)
    worker.blocks.stored(KEYS[:2])
    gateway.membership.workers.append(worker)
    try:
        await until(lambda: known(gateway, "decode-told") == 2)
    finally:
        await worker.stop()


async def test_lost_stream_is_believed_until_it_is_back_with_a_snapshot(gateway: Harness) -> None:
    ledger = BlockLedger(CHUNK, sparse=False)
    ledger.stored(KEYS)
    worker = await add_worker(gateway, "decode-told", ledger)
    prefixes = gateway.service.prefixes
    await until(lambda: known(gateway, "decode-told") == len(KEYS))
    await worker.stop()
    await until(lambda: prefixes.source("decode-told") == "history")
    assert known(gateway, "decode-told") == len(KEYS)
    ledger.removed(KEYS[2:])
    await worker.start()
    try:
        await until(lambda: prefixes.source("decode-told") == "exact" and known(gateway, "decode-told") == 2)
    finally:
        await worker.stop()


async def test_slow_follower_gets_a_snapshot_again_and_misses_nothing(gateway: Harness) -> None:
    ledger = BlockLedger(CHUNK, sparse=False, kept_changes=4)
    worker = await add_worker(gateway, "decode-told", ledger)
    try:
        await until(lambda: gateway.service.prefixes.source("decode-told") == "exact")
        for key in KEYS:  # more changes at once than are kept
            ledger.stored([key])
        for number in range(50):
            ledger.stored([number.to_bytes(16, "big")])
        await until(lambda: known(gateway, "decode-told") == len(KEYS))
    finally:
        await worker.stop()


class Gaps(SilentPolicyObserver):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def block_gap(self, reason: str) -> None:
        self.reasons.append(reason)


HELLO = BlocksHello(generation="1", chunk_tokens=CHUNK, sparse=False)
SNAPSHOT = BlocksSnapshot(seq=5, first=True, last=True, keys=b"".join(KEYS))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([HELLO, SNAPSHOT, BlocksChanged(first=7, changes=[])], "sequence"),
        ([HELLO, BlocksChanged(first=1, changes=[])], "sequence"),
        ([HELLO, BlocksSnapshot(seq=1, first=True, last=False, keys=b""), BlocksChanged(first=2, changes=[])],
         "sequence"),
        ([SNAPSHOT], "protocol_violation"),
        ([HELLO, BlocksSnapshot(seq=1, first=False, last=True, keys=b"")], "protocol_violation"),
        ([HELLO, SNAPSHOT, BlocksChanged(first=6, changes=[("moved", b"")])], "protocol_violation"),
        ([HELLO, SNAPSHOT, BlocksChanged(first=6, changes=[("stored", b"short")])], "protocol_violation"),
        ([BlocksHello(generation="2", chunk_tokens=CHUNK, sparse=False)], "generation"),
        ([BlocksHello(generation="1", chunk_tokens=CHUNK + 1, sparse=False)], "chunk_tokens"),
    ],
)  # fmt: skip
async def test_feed_that_does_not_fit_is_refused_by_reason(
    tmp_path: Path, messages: list[BlocksMessage], reason: str
) -> None:
    instance = StubWorker("d", Role.DECODE, transfers=None).instance  # type: ignore[arg-type]
    feed = gateway_blocks.BlockFeed(instance, PrefixView(CHUNK, enabled=True), SilentPolicyObserver())

    async def take_all() -> None:
        for message in messages:
            await feed.take(message)

    with pytest.raises(FarfillError) as caught:
        await take_all()
    assert caught.value.reason == reason


def test_keys_travel_as_long_as_they_are() -> None:
    assert KEY_BYTES == hashing.KEY_BYTES


async def test_second_snapshot_in_a_stream_counts_as_a_gap_and_voids_the_first() -> None:
    observer, prefixes = Gaps(), PrefixView(CHUNK, enabled=True)
    instance = StubWorker("d", Role.DECODE, transfers=None).instance  # type: ignore[arg-type]
    feed = gateway_blocks.BlockFeed(instance, prefixes, observer)
    again: list[Any] = [HELLO, SNAPSHOT, BlocksSnapshot(seq=9, first=True, last=True, keys=KEYS[0])]
    for message in again:
        await feed.take(message)
    assert observer.reasons == ["overrun"]
    assert prefixes.hits(KEYS).at("d") == 1
    await feed.take(BlocksChanged(first=10, changes=[("removed", KEYS[0])]))
    assert prefixes.hits(KEYS).at("d") == 0
