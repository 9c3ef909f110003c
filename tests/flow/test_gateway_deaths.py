"""A prompt that kills the instances that work on it must not go through all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import Role
from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker

LONG, SHORT = "x" * 100, "hi"


@asynccontextmanager
async def pool(folder: Path, **routing: Any) -> AsyncIterator[tuple[Harness, list[StubWorker]]]:
    """Three decode and three prefill instances."""
    sections = {"routing": {"remote_prefill_threshold_tokens": 32, **routing}, "kv_transfer": {"timeout_ms": 2000}}
    async with running_gateway(folder, **sections) as gateway, AsyncExitStack() as stack:
        for number in (2, 3):
            for role, name in ((Role.DECODE, "decode"), (Role.PREFILL, "prefill")):
                site = "near" if role is Role.DECODE else f"far{number}"
                worker = StubWorker(f"{name}-{number}", role, gateway.decode.transfers, site=site)
                await worker.start()
                stack.push_async_callback(worker.stop)
                gateway.membership.workers.append(worker)
        yield gateway, gateway.membership.workers


async def send(gateway: Harness, prompt: str) -> tuple[int, Any, Any]:
    return await gateway.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 2})


def worked_on(workers: list[StubWorker]) -> int:
    return sum(len(worker.prefills) for worker in workers if worker.dies)


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_prompt_that_kills_prefill_instances_ends_at_the_limit_and_decode_never_computes_it(
    tmp_path: Path, limit: int
) -> None:
    async with pool(tmp_path, max_deaths_per_request=limit) as (gateway, workers):
        for worker in workers:
            worker.dies = worker.role is Role.PREFILL
        status, answer, response = await send(gateway, LONG)
        assert (status, answer["error"]["code"]) == (500, "request_kills_workers")
        assert response.headers["x-should-retry"] == "false"
        assert worked_on(workers) == limit
        assert [over for _, over in gateway.observer.deaths] == [*([False] * (limit - 1)), True]
        assert gateway.observer.finished[0].error_reason == "request_kills_workers"
        # Those that are left serve everybody else.
        status, _, response = await send(gateway, SHORT)
        assert status == 200


async def test_short_prompt_that_kills_decode_instances_ends_after_two(tmp_path: Path) -> None:
    async with pool(tmp_path) as (gateway, workers):
        for worker in workers:
            worker.dies = True
        status, answer, _ = await send(gateway, SHORT)
        assert (status, answer["error"]["code"]) == (500, "request_kills_workers")
        assert sum(len(worker.decodes) for worker in workers) == 2


async def test_dead_engine_in_a_living_process_counts(tmp_path: Path) -> None:
    async with pool(tmp_path) as (gateway, workers):
        for worker in workers:
            if worker.role is Role.PREFILL:
                worker.refuse = (500, ErrorBody(reason="engine_dead", message="the engine died: IndexError"))
        status, answer, _ = await send(gateway, LONG)
        assert (status, answer["error"]["code"]) == (500, "request_kills_workers")
        assert sum(len(worker.prefills) for worker in workers) == 2


async def test_lost_connections_to_living_instances_are_no_deaths(tmp_path: Path) -> None:
    async with pool(tmp_path) as (gateway, workers):
        for worker in workers:
            if worker.role is Role.PREFILL:
                worker.drop_connections = 3
        status, _, response = await send(gateway, LONG)
        assert status == 200
        assert response.headers["x-farfill-placement"] in ("local", "remote")
        assert gateway.observer.deaths == []
