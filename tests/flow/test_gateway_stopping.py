"""A gateway that stops at once tells everybody who still waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from support.gateway_harness import running_gateway

COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
DEADLINE_S = 10.0


async def test_everybody_hears_that_the_gateway_stops(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        gateway.decode.hold_after_first = asyncio.Event()
        async with (
            asyncio.timeout(DEADLINE_S),
            gateway.http.post(gateway.base + COMPLETIONS, json={**BODY, "stream": True}) as response,
        ):
            await response.content.readuntil(b"\n\n")
            whole = asyncio.create_task(gateway.post(COMPLETIONS, BODY))
            while len(gateway.decode.decodes) < 2:
                await asyncio.sleep(0.005)
            gateway.service.open_requests.end()
            *_, last = (await response.text()).strip().split("\n\n")
            status, answer, headers = await whole
        assert msgspec.json.decode(last.removeprefix("data: "))["error"]["code"] == "gateway_stopping"
        assert (status, answer["error"]["code"]) == (503, "gateway_stopping")
        assert int(headers.headers["Retry-After"]) >= 1
        status, answer, _ = await gateway.post(COMPLETIONS, BODY)
        assert (status, answer["error"]["code"]) == (503, "gateway_stopping"), "one that comes late hears it as well"
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(2):
                await gateway.decode.withdrawn.acquire()
    assert [summary.outcome for summary in gateway.observer.finished] == ["error"] * 3
