"""The life of a request: every step, running or ended, found whichever gateway is asked; bounds of what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farfill.clock import WallClock
from farfill.gateway.records import RequestRecord, RequestRecords, weight_bytes
from farfill.registry.asks import ask_for_request, ask_for_status
from farfill.registry.embedded import EmbeddedStore
from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway
from support.memory_disk import MemoryDisk

LONG = "x" * 100


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    async with EmbeddedStore(MemoryDisk(), WallClock()) as opened:
        yield opened


async def send(gateway: Harness, request_id: str, prompt: str = LONG) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    status, _, _ = await gateway.post("/v1/completions", body, **{"X-Request-Id": request_id})
    return status


async def life(gateway: Harness, request_id: str, wait_s: float = 10.0) -> dict[str, Any]:
    found = await gateway.service.lookup.find(request_id, wait_s=wait_s)
    assert found is not None
    return msgspec.json.decode(found)


def steps(found: dict[str, Any]) -> list[str]:
    return [step["name"] for step in found["steps"]]


async def test_life_has_every_step_in_order_with_its_time_and_the_scores(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        assert await send(gateway, "far") == 200
        found = await life(gateway, "far")
    assert (found["state"], found["gateway"]) == ("ok", gateway.service.name)
    assert steps(found) == [
        "accepted", "tokenize", "hash", "queue", "dispatch", "placement", "prefill queue", "prefill", "transfer",
        "KV arrived", "decode queue", "local prefill", "import and first token", "first token", "decode", "ended",
    ]  # fmt: skip
    timed = [step["at_s"] for step in found["steps"] if step["clock"] == "gateway" and step["at_s"] is not None]
    assert timed[0] == 0.0
    assert timed[-1] == max(timed)
    assert found["rankings"][0]["role"] == "decode"
    best = found["rankings"][0]["candidates"][0]
    assert (best["instance"], best["picked"]) == ("decode-near", True)
    assert abs(sum(best["scores"].values()) - best["total"]) < 1e-9
    assert {"least_work", "prefix_affinity"} <= set(best["scores"])
    assert LONG not in str(found)


async def test_failed_far_prefill_fallback_and_error_are_told(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.prefill.refuse = (500, ErrorBody(reason="boom", message="out of order"))
        assert await send(gateway, "fell") == 200
        found = await life(gateway, "fell")
        told = {step["name"]: step["detail"] for step in found["steps"]}
        assert told["far prefill failed"] == "boom: prefill-far: out of order"
        assert told["fallback"].startswith("prefill_failed")
        gateway.decode.refuse = (500, ErrorBody(reason="engine_error", message="broken"))
        assert await send(gateway, "failed", "hi") == 500
        found = await life(gateway, "failed")
        assert found["state"] == "error"
        assert "engine_error" in {step["name"]: step["detail"] for step in found["steps"]}["error"]


async def test_running_request_is_shown_as_far_as_it_got(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.decode.hold_before_start = asyncio.Event()
        sending = asyncio.create_task(send(gateway, "slow", "hi"))
        async with asyncio.timeout(10):
            while not gateway.decode.decodes:
                await asyncio.sleep(0.01)
        found = await life(gateway, "slow", wait_s=0)
        assert found["state"] == "running"
        assert "placement" in steps(found)
        assert "ended" not in steps(found)
        gateway.decode.hold_before_start.set()
        assert await sending == 200
        assert (await life(gateway, "slow"))["state"] == "ok"


async def test_request_is_found_whichever_gateway_is_asked(tmp_path: Path, store: EmbeddedStore) -> None:
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(running_gateway(tmp_path / str(i), store=store)) for i in range(2)
        ]
        assert await send(one, "mine") == 200
        await life(one, "mine")
        found = await life(other, "mine", wait_s=0)
        assert found["gateway"] == one.service.name != other.service.name
        assert found["record"]["decisions"]
        told = await ask_for_request(store, "somebody", "mine")
        assert told is not None
        assert msgspec.json.decode(told) == found
        assert await other.service.lookup.find("unheard-of") is None
        assert not (await store.scan("asks/")).entries
        assert not (await store.scan("answers/")).entries


async def test_all_gateways_say_how_they_are(tmp_path: Path, store: EmbeddedStore) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(running_gateway(tmp_path / str(i), store=store)) for i in range(2)]
        assert await send(gateways[0], "one") == 200
        async with asyncio.timeout(10):
            while len((await store.scan("gateways/")).entries) < 2:
                await asyncio.sleep(0.02)
        answers = [msgspec.json.decode(answer) for answer in await ask_for_status(store, "somebody")]
    assert {answer["gateway"] for answer in answers} == {g.service.name for g in gateways}
    served = next(answer for answer in answers if answer["gateway"] == gateways[0].service.name)
    assert served["traffic"]["requests_per_s"] > 0
    assert served["traffic"]["far_ratio"] == 1.0
    assert served["traffic"]["ttft_p50_s"] > 0
    assert served["links"][0]["site"] == "far"


def test_ring_is_bounded_by_count_and_bytes() -> None:
    def record(number: int) -> RequestRecord:
        return RequestRecord(request_id=f"r{number}", endpoint="chat", model="m", accepted_unix_s=0.0, stream=False)

    by_count = RequestRecords(capacity=3)
    for number in range(5):
        by_count.publish(record(number))
    assert (len(by_count), by_count.look("r1"), by_count.look("r2") is not None) == (3, None, True)
    by_bytes = RequestRecords(max_bytes=2 * weight_bytes(record(0)))
    for number in range(5):
        by_bytes.publish(record(number))
        by_bytes.publish(record(number))  # the same one again weighs once
    assert (len(by_bytes), by_bytes.look("r2"), by_bytes.look("r4") is not None) == (2, None, True)
