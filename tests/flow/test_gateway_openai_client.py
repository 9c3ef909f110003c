"""What the `openai` client does by itself: retries as told, timeouts that end the work, endpoints that are not here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway

HELLO: Any = [{"role": "user", "content": "hello"}]
NO_ROOM = (503, ErrorBody(reason="kv_memory", message="full", retryable=True, retry_after_s=7.0))


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path) as harness:
        yield harness


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses the client makes before it tries again; none of them is waited for."""
    made: list[float] = []

    async def pause(self: Any, *, retries_taken: int, max_retries: int, options: Any, response: Any) -> None:
        remaining = max_retries - retries_taken
        made.append(self._calculate_retry_timeout(remaining, options, response.headers if response else None))

    monkeypatch.setattr(AsyncOpenAI, "_sleep_for_retry", pause)
    return made


def client(gateway: Harness, retries: int = 2, timeout: float = 20.0) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.base}/v1", api_key="none", max_retries=retries, timeout=timeout)


async def ask(api: AsyncOpenAI, **changes: Any) -> Any:
    return await api.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 2, **changes})


async def test_lack_of_room_is_tried_again_after_the_pause_it_asked_for(gateway: Harness, pauses: list[float]) -> None:
    gateway.decode.refuse = NO_ROOM

    async with client(gateway) as api:
        asking = asyncio.create_task(ask(api))
        async with asyncio.timeout(20):
            await gateway.decode.received.acquire()
        gateway.decode.refuse = None
        answer = await asking
    assert answer.choices[0].message.content == "w0 w1 "
    assert pauses[0] == 7


async def test_too_much_is_told_as_such_when_tries_are_used_up(tmp_path: Path, pauses: list[float]) -> None:
    limits = {"tenants": {"*": {"requests_per_s": 0.01, "burst_s": 1}}}
    async with running_gateway(tmp_path, admission=limits) as gateway, client(gateway) as api:
        await ask(api)
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(api)
    assert caught.value.code == "tenant_requests"
    assert len(pauses) == 2


async def test_wrong_requests_are_not_tried_again(gateway: Harness, pauses: list[float]) -> None:
    async with client(gateway) as api:
        with pytest.raises(openai.BadRequestError) as wrong:
            await ask(api, temperature=3)
        with pytest.raises(openai.NotFoundError):
            await ask(api, model="absent")
        with pytest.raises(openai.BadRequestError) as unknown:
            await ask(api, extra_body={"functions": [{"name": "f"}]})
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    assert unknown.value.code == "unsupported"
    assert pauses == []


async def test_endpoints_that_are_not_here_say_so(gateway: Harness) -> None:
    async with client(gateway, retries=0) as api:
        calls = (
            api.embeddings.create(model="tiny", input="x"),
            api.responses.create(model="tiny", input="x"),
            api.moderations.create(model="tiny", input="x"),
            api.images.generate(model="tiny", prompt="x"),
            api.files.list(),
            api.batches.list(),
        )
        for call in calls:
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert caught.value.code == "not_found"
            assert "unknown path" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_loses_patience_ends_the_work(gateway: Harness, stream: bool) -> None:
    gateway.decode.hold_before_start = asyncio.Event()
    async with client(gateway, retries=0, timeout=0.5) as api:
        with pytest.raises(openai.APITimeoutError):
            await ask(api, stream=stream)
    async with asyncio.timeout(20):
        await gateway.decode.withdrawn.acquire()


async def test_stream_that_is_left_ends_the_work(gateway: Harness) -> None:
    gateway.decode.hold_after_first = asyncio.Event()
    async with client(gateway) as api:
        stream = await ask(api, stream=True, max_tokens=5)
        async for _ in stream:
            break
        await stream.close()
    async with asyncio.timeout(20):
        await gateway.decode.withdrawn.acquire()


class Answer(BaseModel):
    number: int


async def test_parsed_answer_is_held_to_the_schema(gateway: Harness) -> None:
    gateway.decode.texts, gateway.decode.finish_reason = ['{"number": 7}'], "stop"
    async with client(gateway) as api:
        done = await api.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer)
    assert done.choices[0].message.parsed == Answer(number=7)
    assert "number" in gateway.decode.decodes[0].sampling.grammar


async def test_request_id_reaches_the_client_on_answers_and_errors(gateway: Harness) -> None:
    async with client(gateway, retries=0) as api:
        done = await ask(api, extra_headers={"X-Request-Id": "mine-1"})
        assert done._request_id == "mine-1"
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(api, temperature=3, extra_headers={"X-Request-Id": "mine-2"})
        assert caught.value.request_id == "mine-2"
        raw = await api.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=1)
        assert raw.headers["x-farfill-placement"] == "local"


async def test_server_that_goes_away_is_a_connection_error(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        api = client(gateway, retries=0)
        await ask(api)
    async with api:
        with pytest.raises(openai.APIConnectionError):
            await ask(api)
