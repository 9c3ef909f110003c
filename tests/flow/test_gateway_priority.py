"""A request's priority reaches both workers; one out of bounds is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.gateway_harness import Harness, running_gateway

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path) as harness:
        yield harness


@pytest.mark.parametrize(("fields", "expected"), [({}, 0), ({"priority": -7}, -7), ({"priority": 100}, 100)])
async def test_priority_and_tenant_reach_both_workers(gateway: Harness, fields: dict[str, int], expected: int) -> None:
    long = [65 + i % 26 for i in range(200)]
    status, _, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": long, "max_tokens": 1, **fields})
    assert status == 200
    assert [c.priority for c in (*gateway.decode.decodes, *gateway.prefill.prefills)] == [expected] * 2
    assert {c.tenant for c in (*gateway.decode.decodes, *gateway.prefill.prefills)} == {"default"}


@pytest.mark.parametrize("priority", [-101, 101])
async def test_priority_out_of_bounds_is_refused(gateway: Harness, priority: int) -> None:
    status, body, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "a", "priority": priority})
    assert status == 400
    assert body["error"]["param"] == "priority"
    assert "-100 to 100" in body["error"]["message"]
    assert not gateway.decode.decodes
