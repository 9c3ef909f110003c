"""Several models and decode pools at one gateway: own site first, own thresholds, own limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import InstanceState, Role
from farfill.gateway.tokenizer import load_tokenizer
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker, Transfers
from support.tiny_tokenizer import write_model_folder


class Pools:
    """Two models: `tiny` at two near sites, `large` at one, both prefilled at one far site."""

    def __init__(self, gateway: Harness, workers: dict[str, StubWorker]) -> None:
        self.gateway, self.workers = gateway, workers

    async def ask(self, model: str, prompt: str) -> tuple[str, str]:
        """(decode instance, prefill instance or "") that served it."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        status, answer, response = await self.gateway.post("/v1/completions", body)
        assert status == 200, answer
        return response.headers["x-farfill-decode-instance"], response.headers.get("x-farfill-prefill-instance", "")


@pytest.fixture
async def pools(tmp_path: Path) -> AsyncIterator[Pools]:
    workers = {
        "elsewhere": StubWorker("decode-elsewhere", Role.DECODE, Transfers(), site="near-2"),
        "large": StubWorker("decode-large", Role.DECODE, Transfers(), model="large", fingerprint="fp-large"),
        "far-large": StubWorker(
            "prefill-large", Role.PREFILL, Transfers(), model="large", fingerprint="fp-large", site="far"
        ),
    }
    folder = write_model_folder(tmp_path / "large")
    large: dict[str, Any] = {
        "name": "large", "path": folder, "remote_prefill_threshold_tokens": 200, "max_concurrent_requests": 1,
    }  # fmt: skip
    async with running_gateway(
        tmp_path, more_models={"big": load_tokenizer(folder)}, workers=list(workers.values()), models={"big": large}
    ) as gateway:
        for worker in workers.values():
            worker.transfers = gateway.decode.transfers
        yield Pools(gateway, workers)


async def test_each_model_stays_in_its_pool_and_has_its_own_threshold(pools: Pools) -> None:
    assert await pools.ask("tiny", "a" * 60) == ("decode-near", "prefill-far")
    assert await pools.ask("large", "b" * 60) == ("decode-large", "")
    assert await pools.ask("large", "c" * 300) == ("decode-large", "prefill-large")


async def test_own_site_decodes_first_and_another_helps_when_it_cannot(pools: Pools) -> None:
    for number in range(4):
        assert (await pools.ask("tiny", f"short {number}"))[0] == "decode-near"
    pools.gateway.decode.state = InstanceState.DRAINING
    assert (await pools.ask("tiny", "short"))[0] == "decode-elsewhere"


async def test_what_tokens_cost_is_the_models_and_the_link_is_shared(pools: Pools) -> None:
    await pools.ask("tiny", "d" * 60)
    models = {served.name: served.service for served in pools.gateway.service.models.all()}
    async with asyncio.timeout(20):
        while not models["tiny"].links.bytes_per_token:
            await asyncio.sleep(0.01)
    assert models["large"].links.bytes_per_token == 0
    assert models["large"].links.utilisation("far") == models["tiny"].links.utilisation("far")
    assert (models["tiny"].threshold.tokens, models["large"].threshold.tokens) == (32, 200)


async def test_limit_of_one_model_leaves_the_other_alone(pools: Pools) -> None:
    held = pools.workers["large"].hold_before_start = asyncio.Event()
    running = asyncio.create_task(pools.ask("large", "e"))
    async with asyncio.timeout(20):
        await pools.workers["large"].received.acquire()
    body = {"model": "large", "prompt": "f", "max_tokens": 1}
    status, answer, response = await pools.gateway.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (429, "model_busy")
    assert "Retry-After" in response.headers
    assert (await pools.ask("tiny", "g"))[0] == "decode-near"
    held.set()
    assert (await running)[0] == "decode-large"


async def test_gateway_is_ready_with_one_model_and_names_the_other(pools: Pools) -> None:
    pools.workers["large"].state = InstanceState.DRAINING
    status, told, _ = await pools.gateway.get("/ready")
    assert (status, told["status"]) == (200, "ready")
    assert told["missing"] == "no decode instance of large is ready and reachable"
    pools.gateway.decode.state = pools.workers["elsewhere"].state = InstanceState.DRAINING
    status, told, _ = await pools.gateway.get("/ready")
    assert (status, told["status"]) == (503, "not ready")
