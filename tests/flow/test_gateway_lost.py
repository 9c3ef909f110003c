"""Decode that falls silent: a request ends when the registry has dropped the instance, not at its own deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from farfill.clock import VirtualClock
from farfill.gateway.lost import LostWatch
from support.gateway_harness import Harness, StubMembership, running_gateway
from support.stub_worker import StubWorker

COMPLETIONS = "/v1/completions"
LEASE_S = 0.5
DEADLINE_S = 10.0


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path, registry={"site": "near", "lease_s": LEASE_S}) as running:
        yield running


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 3, **more}


async def test_stream_of_a_silent_instance_that_left_the_registry_ends_with_an_error(gateway: Harness) -> None:
    gateway.decode.hold_after_first = asyncio.Event()
    async with (
        asyncio.timeout(DEADLINE_S),
        gateway.http.post(gateway.base + COMPLETIONS, json=body(stream=True)) as response,
    ):
        assert b"w0 " in await response.content.readuntil(b"\n\n")
        gateway.membership.workers.remove(gateway.decode)
        rest = await response.text()
    assert '"code":"worker_lost"' in rest
    assert "no longer registered" in rest
    assert "[DONE]" not in rest
    assert gateway.service.work.requests(gateway.decode.instance) == 0


async def test_request_that_waits_for_a_lost_instance_is_served_by_another(gateway: Harness) -> None:
    gateway.decode.hold_before_start = asyncio.Event()
    second = StubWorker("decode-two", gateway.decode.role, gateway.decode.transfers)
    await second.start()
    try:
        request = asyncio.create_task(gateway.post(COMPLETIONS, body()))
        async with asyncio.timeout(DEADLINE_S):
            await gateway.decode.received.acquire()
            gateway.membership.workers[:] = [second]
            status, _, response = await request
        assert (status, response.headers["x-farfill-decode-instance"]) == (200, "decode-two")
        assert gateway.observer.retries == ["worker_lost"]
    finally:
        await second.stop()


async def test_only_silence_of_an_instance_that_is_gone_ends_a_wait(gateway: Harness) -> None:
    clock, membership = VirtualClock(), StubMembership([gateway.decode, gateway.prefill])
    watch = LostWatch(membership, 4.0, clock)
    talking, silent, slow_client = (watch.begin(gateway.decode.instance) for _ in range(3))
    lost: list[str] = []
    for name, wait in (("talking", talking), ("silent", silent), ("slow client", slow_client)):
        wait.on_lost(lambda name=name: lost.append(name))
    slow_client.silent_since_s = None
    clock.advance(3600)
    watch.look()
    assert lost == [], "it is listed, however silent"
    membership.workers.remove(gateway.decode)
    for _ in range(2):
        talking.silent_since_s = clock.now_s()
        watch.look()
        clock.advance(1.5)
    membership.workers.append(gateway.decode)
    watch.look()
    membership.workers.remove(gateway.decode)
    watch.look()
    clock.advance(1.5)
    talking.silent_since_s = clock.now_s()
    watch.look()
    assert lost == [], "it came back meanwhile"
    clock.advance(1.0)
    watch.look()
    assert lost == ["silent"]
    silent.end()
    assert silent.lost
    assert not talking.lost
