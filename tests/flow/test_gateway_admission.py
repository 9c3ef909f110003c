"""Turns, queues, limits of tenants, and the fallback budget, through the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farfill.core.cluster import InstanceState
from farfill.policy.admission import AdmissionLimits
from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway

COMPLETIONS = "/v1/completions"
LONG = "x" * 100


def body(prompt: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


def waiting(gateway: Harness) -> int:
    return gateway.service.admission._machine.waiting


async def refused(gateway: Harness, sent: dict[str, Any], **headers: str) -> tuple[int, str, int]:
    """(status, code, Retry-After; 0: none) of a request that is turned away."""
    status, answer, response = await gateway.post(COMPLETIONS, sent, **headers)
    return status, answer["error"]["code"], int(response.headers.get("Retry-After", "0"))


async def test_one_runs_others_wait_by_priority_and_the_queue_is_bounded(tmp_path: Path) -> None:
    limits = {"gateway": {"max_concurrent_requests": 1}, "admission": {"max_queue": 2}}
    async with running_gateway(tmp_path, **limits) as gateway:
        gateway.decode.hold_before_start = asyncio.Event()
        tasks = [asyncio.create_task(gateway.post(COMPLETIONS, body("a")))]
        await until(lambda: len(gateway.decode.decodes) == 1)
        for i, (prompt, priority) in enumerate((("later", 5), ("sooner", -5))):
            tasks.append(asyncio.create_task(gateway.post(COMPLETIONS, body(prompt, priority=priority))))
            await until(lambda count=i + 1: waiting(gateway) == count)
        assert await refused(gateway, body("d")) == (429, "rate_limit_exceeded", 1)
        gateway.decode.hold_before_start.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200, 200]
        assert [command.priority for command in gateway.decode.decodes] == [0, -5, 5]


async def test_who_waits_too_long_is_503_and_who_leaves_waits_no_more(tmp_path: Path) -> None:
    limits = {"gateway": {"max_concurrent_requests": 1}, "admission": {"queue_timeout_s": 0.2}}
    async with running_gateway(tmp_path, **limits) as gateway:
        gateway.decode.hold_before_start = asyncio.Event()
        running = asyncio.create_task(gateway.post(COMPLETIONS, body()))
        await until(lambda: len(gateway.decode.decodes) == 1)
        assert await refused(gateway, body()) == (503, "queue_deadline", 1)
        leaving = asyncio.create_task(gateway.post(COMPLETIONS, body()))
        await until(lambda: waiting(gateway) == 1)
        leaving.cancel()
        await until(lambda: waiting(gateway) == 0)
        gateway.decode.hold_before_start.set()
        assert (await running)[0] == 200
        assert len(gateway.decode.decodes) == 1
        assert gateway.service.admission._machine.running == 0


async def test_tenants_have_limits_of_their_own(tmp_path: Path) -> None:
    admission = {
        "tenant_header": "X-Tenant",
        "tenants": {
            "few": {"requests_per_s": 0.001, "burst_s": 2000.0},
            "*": {"tokens_per_s": 0.01, "burst_s": 3000.0},
        },
    }
    async with running_gateway(tmp_path, admission=admission) as gateway:
        for _ in range(2):
            assert (await gateway.post(COMPLETIONS, body(), **{"X-Tenant": "few"}))[0] == 200
        status, code, retry_s = await refused(gateway, body(), **{"X-Tenant": "few"})
        assert (status, code) == (429, "tenant_requests")
        assert 900 < retry_s <= 1000
        # 30 tokens are in the bucket: 3 of prompt, and 2 of 20 asked for are used; the rest is given back.
        for _ in range(2):
            gateway.decode.texts = ["a", "b"]
            assert (await gateway.post(COMPLETIONS, body(max_tokens=20)))[0] == 200
        assert (await refused(gateway, body(max_tokens=25)))[:2] == (429, "tenant_tokens")
        status, answer, _ = await gateway.post(COMPLETIONS, body(), **{"X-Tenant": "a:b"})
        assert (status, answer["error"]["param"]) == (400, "X-Tenant")


async def test_outstanding_kv_tokens_are_bounded_and_what_never_fits_is_400(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, admission={"max_kv_tokens": 50}) as gateway:
        gateway.decode.hold_before_start = asyncio.Event()
        first = asyncio.create_task(gateway.post(COMPLETIONS, body(max_tokens=30)))
        await until(lambda: len(gateway.decode.decodes) == 1)
        second = asyncio.create_task(gateway.post(COMPLETIONS, body(max_tokens=30)))
        await until(lambda: waiting(gateway) == 1)
        assert (await refused(gateway, body(max_tokens=60)))[:2] == (400, "too_large")
        gateway.decode.hold_before_start.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]


async def test_budget_bounds_local_prefill_of_what_cannot_go_far(tmp_path: Path) -> None:
    routing = {"fallback_budget": {"tokens_per_s": 0.1, "burst_s": 1500.0}}  # 150 tokens
    async with running_gateway(tmp_path, routing=routing) as gateway:
        gateway.prefill.state = InstanceState.DRAINING
        status, _, response = await gateway.post(COMPLETIONS, body(LONG))
        assert (status, response.headers["x-farfill-reason"]) == (200, "no_prefill_instance")
        status, code, retry_s = await refused(gateway, body("y" * 100))
        assert (status, code) == (503, "fallback_tokens")
        assert retry_s >= 50
        assert (await gateway.post(COMPLETIONS, body("short")))[0] == 200


async def test_budget_turns_away_what_failed_far_and_frees_decode(tmp_path: Path) -> None:
    routing = {
        "fallback_budget": {"tokens_per_s": 0.1, "burst_s": 1500.0},
        "circuit_breaker": {"min_requests": 1000},
    }
    async with running_gateway(tmp_path, routing=routing) as gateway:
        gateway.prefill.refuse = (500, ErrorBody(reason="engine_error", message="broke"))
        status, _, response = await gateway.post(COMPLETIONS, body(LONG))
        assert (status, response.headers["x-farfill-fallback"]) == (200, "prefill_failed")
        assert (await refused(gateway, body("y" * 100), **{"X-Request-Id": "r"}))[:2] == (503, "fallback_tokens")
        async with asyncio.timeout(10):
            await gateway.decode.withdrawn.acquire()
        assert not gateway.decode.decodes[-1].allow_fallback
        record = await gateway.record("r")
        assert [d["policy"] for d in record["decisions"]][-1] == "fallback_budget"
        assert gateway.service.fallback._budget._running == 0


async def test_guard_of_running_streams_stops_local_prefill(tmp_path: Path) -> None:
    routing = {"fallback_budget": {"itl_limit_ms": 50.0}}
    async with running_gateway(tmp_path, routing=routing) as gateway:
        gateway.prefill.state = InstanceState.DRAINING
        assert (await gateway.post(COMPLETIONS, body(LONG)))[0] == 200
        gateway.service.fallback._gaps.clear()
        gateway.service.fallback._looked_s = float("-inf")
        for _ in range(100):
            gateway.service.fallback.token_gap(0.2, gateway.service.deps.clock.now_s())
        assert await refused(gateway, body("y" * 100)) == (503, "fallback_itl_guard", 2)


async def test_kv_on_its_way_is_bounded_and_free_once_it_has_crossed(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        assert (await gateway.post(COMPLETIONS, body(LONG)))[0] == 200  # 1000 bytes of KV for such a prompt
        machine = gateway.service.admission._machine
        machine.configure(AdmissionLimits(link_bytes=1500), {})
        gateway.decode.hold_after_first = asyncio.Event()
        first = asyncio.create_task(gateway.post(COMPLETIONS, body("a" * 100)))
        await until(lambda: len(gateway.decode.decodes) == 2)
        await until(lambda: machine.outstanding[1] == 0)
        gateway.prefill.hold_prefill = asyncio.Event()
        second = asyncio.create_task(gateway.post(COMPLETIONS, body("b" * 100)))
        # The first one's KV has crossed, though it goes on: the second may begin.
        await until(lambda: len(gateway.decode.decodes) == 3)
        third = asyncio.create_task(gateway.post(COMPLETIONS, body("c" * 100)))
        await until(lambda: waiting(gateway) == 1)
        assert 900 < machine.outstanding[1] <= 1500
        gateway.prefill.hold_prefill.set()
        # Nobody ended, and yet the third one's turn came.
        await until(lambda: len(gateway.decode.decodes) == 4)
        assert not first.done()
        assert not second.done()
        gateway.decode.hold_after_first.set()
        assert [(await task)[0] for task in (first, second, third)] == [200, 200, 200]
        assert machine.outstanding == (0, 0)
