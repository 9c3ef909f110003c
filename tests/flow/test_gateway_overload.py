"""More asked for than there is: who goes first, who is turned away before time is lost, and what each hears."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import InstanceState, Role
from farfill.gateway.errors import error_response
from farfill.gateway.pipeline.admit import _TEXTS, _error
from farfill.policy.admission import Refusal, Refused, _Done
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker

COMPLETIONS = "/v1/completions"
LONG = "x" * 100
DEADLINE_S = 20.0


def body(prompt: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.005)


def waiting(gateway: Harness) -> int:
    return gateway.service.admission._machine.waiting


async def test_tenants_that_wait_take_turns_by_their_weight(tmp_path: Path) -> None:
    limits = {
        "gateway": {"site": "near", "max_concurrent_requests": 1},
        "admission": {"tenant_header": "X-Tenant", "tenants": {"heavy": {"weight": 3.0}, "light": {"weight": 1.0}}},
    }
    async with running_gateway(tmp_path, **limits) as gateway:
        gateway.decode.hold_before_start = asyncio.Event()
        asked = [asyncio.create_task(gateway.post(COMPLETIONS, body(), **{"X-Tenant": "first"}))]
        await until(lambda: len(gateway.decode.decodes) == 1)
        for tenant in ("light", "heavy"):  # the light one came first, with all of its requests
            for _ in range(8):
                count = waiting(gateway)
                asked.append(asyncio.create_task(gateway.post(COMPLETIONS, body(), **{"X-Tenant": tenant})))
                await until(lambda count=count: waiting(gateway) == count + 1)
        gateway.decode.hold_before_start.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 17
        order = [command.tenant for command in gateway.decode.decodes[1:]]
    # While both wait: three of one for one of the other.
    assert order[:8].count("heavy") == 6, order
    assert order[8:].count("light") == 6, order


async def test_what_would_come_too_late_is_shed_at_once(tmp_path: Path) -> None:
    limits = {"gateway": {"site": "near", "max_concurrent_requests": 1}, "admission": {"queue_timeout_s": 5.0}}
    async with running_gateway(tmp_path, **limits) as gateway:
        machine, now_s = gateway.service.admission._machine, gateway.service.deps.clock.now_s()
        machine._done.extend(_Done(now_s, tokens=5, seconds=6.0) for _ in range(8))  # six seconds for such a request
        gateway.decode.hold_before_start = asyncio.Event()
        asked = [asyncio.create_task(gateway.post(COMPLETIONS, body())) for _ in range(2)]
        await until(lambda: waiting(gateway) == 1)
        began_s = asyncio.get_running_loop().time()
        status, answer, response = await gateway.post(COMPLETIONS, body())
        assert (status, answer["error"]["code"]) == (503, "shed")
        assert 6 <= int(response.headers["Retry-After"]) <= 7
        assert asyncio.get_running_loop().time() - began_s < 5.0, "long before it would have timed out"
        assert waiting(gateway) == 1
        gateway.decode.hold_before_start.set()
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200, 200]


async def test_fallbacks_at_once_are_bounded_and_come_again(tmp_path: Path) -> None:
    routing = {"fallback_budget": {"max_concurrent": 1}}
    async with running_gateway(tmp_path, routing=routing) as gateway:
        gateway.prefill.state = InstanceState.DRAINING
        gateway.decode.hold_before_start = asyncio.Event()
        first = asyncio.create_task(gateway.post(COMPLETIONS, body(LONG)))
        await until(lambda: len(gateway.decode.decodes) == 1)
        status, answer, response = await gateway.post(COMPLETIONS, body("y" * 100))
        assert (status, answer["error"]["code"]) == (503, "fallback_concurrency")
        assert int(response.headers["Retry-After"]) >= 1
        gateway.decode.hold_before_start.set()
        assert (await first)[0] == 200
        assert (await gateway.post(COMPLETIONS, body("z" * 100)))[0] == 200


async def test_a_slow_request_is_never_sent_twice(tmp_path: Path) -> None:
    """No hedging: two answers to one request cost twice, when there is least to spare."""
    async with running_gateway(tmp_path, kv_transfer={"timeout_ms": 100}) as gateway:
        second = StubWorker("decode-two", Role.DECODE, gateway.decode.transfers)
        await second.start()
        gateway.membership.workers.append(second)
        gateway.decode.hold_before_start = second.hold_before_start = asyncio.Event()
        try:
            asked = asyncio.create_task(gateway.post(COMPLETIONS, body()))
            asyncio.get_running_loop().call_later(0.5, gateway.decode.hold_before_start.set)
            assert (await asked)[0] == 200
            assert len(gateway.decode.decodes) + len(second.decodes) == 1
        finally:
            await second.stop()


@pytest.mark.parametrize("reason", Refusal)
def test_each_refusal_says_who_can_do_what_about_it(reason: Refusal) -> None:
    """400: another request; 429: the client asks for too much; 503: the cluster has too little now."""
    wanted = {
        Refusal.TOO_LARGE: 400,
        Refusal.TENANT_REQUESTS: 429,
        Refusal.TENANT_TOKENS: 429,
        Refusal.TENANT_QUEUE: 429,
        Refusal.QUEUE: 429,
        Refusal.SHED: 503,
        Refusal.DEADLINE: 503,
    }[reason]
    error = _error(Refused("r", reason, 7.2))
    answer = error_response(error)
    assert (reason.status, answer.status) == (wanted, wanted)
    assert answer.headers.get("Retry-After") == (None if wanted == 400 else "8")
    assert error.reason == str(reason)
    assert "admission." in _TEXTS[reason] or reason is Refusal.SHED, "it names the setting"
