"""A far site that answers nothing: it costs one connect timeout, once, and is used again when it is back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from farfill.core.cluster import Role
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker, Transfers

TIMEOUT_MS = 700
DEADLINE_S = 30.0


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that takes no connection and refuses none: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(listener.getsockname())
        yield listener.getsockname()[1]


class Sites:
    """A gateway with two far sites; `hole` is the port of the one that answers nothing."""

    def __init__(self, gateway: Harness, lost: StubWorker, hole: contextlib.ExitStack) -> None:
        self.gateway, self.lost, self.hole = gateway, lost, hole

    async def ask(self) -> tuple[str, str]:
        """(who prefilled, why others did not) of one long prompt, which must be answered from far."""
        asked = {"model": "tiny", "prompt": 2 * uuid.uuid4().hex, "max_tokens": 2}  # no prefix hit of a former one
        status, body, response = await self.gateway.post("/v1/completions", asked)
        assert status == 200, body
        assert response.headers["x-farfill-placement"] == "remote"
        return response.headers["x-farfill-prefill-instance"], response.headers.get("x-farfill-continued", "")


@pytest.fixture
async def sites(tmp_path: Path) -> AsyncIterator[Sites]:
    with contextlib.ExitStack() as hole:
        port = hole.enter_context(black_hole())
        lost = StubWorker("prefill-a-lost", Role.PREFILL, Transfers(), site="lost")
        lost.listen_at(f"http://127.0.0.1:{port}")
        async with running_gateway(tmp_path, kv_transfer={"timeout_ms": TIMEOUT_MS, "continuations": 2}) as gateway:
            gateway.membership.workers.append(lost)
            lost.transfers = gateway.decode.transfers
            yield Sites(gateway, lost, hole)
            await lost.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.02)


async def first_to_the_lost_site(sites: Sites) -> None:
    """The other site is kept busy meanwhile, so that the lost one is chosen."""
    claim = sites.gateway.service.work.begin(sites.gateway.prefill.instance, 10**6)
    asked = [asyncio.create_task(sites.ask()) for _ in range(6)]
    await until(lambda: bool(sites.gateway.service.work.requests(sites.lost.instance)))
    claim.end()
    answers = await asyncio.gather(*asked)
    assert {name for name, _ in answers} == {"prefill-far"}
    assert "prefill_unreachable" in {why for _, why in answers}


async def test_unreachable_site_costs_later_requests_nothing(sites: Sites) -> None:
    await first_to_the_lost_site(sites)
    attempts = sites.gateway.observer.legs.count("prefill_unreachable")
    assert not sites.gateway.service.health.allows(sites.lost.instance)
    claim = sites.gateway.service.work.begin(sites.gateway.prefill.instance, 10**6)
    for _ in range(5):
        assert await sites.ask() == ("prefill-far", "")
    claim.end()
    assert sites.gateway.observer.legs.count("prefill_unreachable") == attempts


async def test_site_that_is_back_takes_prompts_again(sites: Sites) -> None:
    await first_to_the_lost_site(sites)
    sites.hole.close()
    await sites.lost.start()
    await until(lambda: sites.gateway.service.health.allows(sites.lost.instance))
    claim = sites.gateway.service.work.begin(sites.gateway.prefill.instance, 10**6)
    assert await sites.ask() == ("prefill-a-lost", "")
    claim.end()


async def test_who_waits_for_the_same_address_stops_waiting_with_the_first(sites: Sites) -> None:
    client = sites.gateway.service.client
    loop = asyncio.get_running_loop()
    began = asyncio.create_task(client.reach(sites.lost.instance))
    await asyncio.sleep(0.3 * TIMEOUT_MS / 1000)
    later = [asyncio.create_task(client.reach(sites.lost.instance)) for _ in range(3)]
    assert await began is False
    at_s = loop.time()
    assert await asyncio.gather(*later) == [False] * 3
    assert loop.time() - at_s < 0.2 * TIMEOUT_MS / 1000, "each of them had another 30 % of its own timeout left"
