"""Prefixes that an operator has workers keep: over the admin API, on a worker, and in what prompts find there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from farfill.gateway.access_observe import SilentAccessObserver
from farfill.gateway.admin import build_admin_app
from farfill.gateway.admin_parts import Admin, AdminParts
from farfill.gateway.reload import Reloaded
from farfill.registry.api_keys import KeyDigests
from farfill.wire.control import ErrorBody, KeepPrefixCommand, KeepPrefixReply
from support.access import PEPPER
from support.gateway_harness import Harness, running_gateway
from support.worker_harness import CHUNK, DECODE, PREFILL, RefusedError, TwoWorkers

PREFIX_BYTES = 1 << 16


@pytest.mark.parametrize("states", [False, True])
async def test_pinned_prefix_is_computed_once_and_found_by_the_first_prompt(tmp_path: Path, states: bool) -> None:
    options: dict[str, Any] = {"prefix_cache_bytes": PREFIX_BYTES}
    if states:
        options |= {"window_tokens": 24, "states": True}
    async with TwoWorkers.running(tmp_path, **options) as two:
        begin = two.prompt(3 * CHUNK + 5)
        command = KeepPrefixCommand(token_ids=begin, cache_salt="t:", pinned=True, ttl_s=60.0, compute=True)
        kept = await two.call(DECODE, "/v1/prefixes", command, KeepPrefixReply)
        assert (kept.tokens, kept.there_tokens) == (3 * CHUNK, 3 * CHUNK)
        assert 0 < kept.pinned_bytes <= PREFIX_BYTES // 2
        prompt = begin + two.prompt(20, seed=5)
        answer = await two.decode(prompt, cache_salt="t:")
        assert answer.start.cached_tokens == 3 * CHUNK
        assert answer.tokens == two.expected(prompt)
        for seed in range(30):
            await two.decode(two.prompt(6 * CHUNK, seed=seed + 10), max_tokens=1)
        assert (await two.decode(prompt, cache_salt="t:", max_tokens=1)).start.cached_tokens >= 3 * CHUNK
        back = await two.call(
            DECODE, "/v1/prefixes", KeepPrefixCommand(token_ids=begin, cache_salt="t:"), KeepPrefixReply
        )
        assert (back.there_tokens, back.pinned_bytes) == (3 * CHUNK, 0)


async def test_what_is_shorter_than_a_chunk_or_no_token_is_not_kept(tmp_path: Path) -> None:
    async with TwoWorkers.running(tmp_path, prefix_cache_bytes=PREFIX_BYTES) as two:
        short = KeepPrefixCommand(token_ids=two.prompt(CHUNK - 1), pinned=True, compute=True)
        kept = await two.call(PREFILL, "/v1/prefixes", short, KeepPrefixReply)
        assert (kept.tokens, kept.there_tokens, kept.pinned_bytes) == (0, 0, 0)
        with pytest.raises(RefusedError, match="token_ids"):
            await two.call(PREFILL, "/v1/prefixes", KeepPrefixCommand(token_ids=[-1] * CHUNK), KeepPrefixReply)


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[tuple[Harness, str]]:
    async with running_gateway(tmp_path) as harness:
        parts = AdminParts(reload=lambda: Reloaded((), ()), key_store=None, digests=KeyDigests(PEPPER))

        async def everybody(_: web.Request) -> Admin:
            return Admin("test", may_write=True)

        runner = web.AppRunner(
            build_admin_app(harness.service, parts, everybody, SilentAccessObserver()), access_log=None
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield harness, f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def put(admin: tuple[Harness, str], body: Any) -> tuple[int, Any]:
    harness, url = admin
    async with harness.http.put(f"{url}/admin/prefixes", json=body) as response:
        return response.status, await response.json()


async def test_admin_tells_all_workers_of_the_model_what_the_chats_of_a_tenant_begin_with(
    admin: tuple[Harness, str],
) -> None:
    harness, _ = admin
    system = {"role": "system", "content": "You are very helpful, and you say so in many words."}
    harness.prefill.refuse = (400, ErrorBody(reason="prefixes_not_kept", message="vLLM does it by itself"))
    status, told = await put(
        admin, {"messages": [system], "tenant": "acme", "key_salt": "k", "cache_salt": "s", "ttl_s": 60, "weight": 3}
    )
    assert status == 200, told
    (command,) = harness.decode.kept
    assert told["prompt_tokens"] == len(command.token_ids)
    assert told["workers"]["decode-near"] == {"tokens": len(command.token_ids), "there_tokens": 0, "pinned_bytes": 7}
    assert told["workers"]["prefill-far"]["reason"] == "prefixes_not_kept"
    assert (command.cache_salt, command.pinned, command.weight, command.ttl_s, command.compute) == (
        "acme~k:s",
        True,
        3.0,
        60.0,
        True,
    )
    chat = {"model": "tiny", "messages": [system, {"role": "user", "content": "Hello"}], "max_tokens": 2}
    assert (await harness.post("/v1/chat/completions", chat))[0] == 200
    asked = harness.decode.decodes[-1]
    assert asked.token_ids[: len(command.token_ids)] == command.token_ids
    status, _ = await put(admin, {"prompt": [1, 2, 3], "pinned": False})
    last = harness.decode.kept[-1]
    assert (status, last.token_ids, last.cache_salt, last.pinned) == (200, [1, 2, 3], asked.cache_salt, False)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "weight": 0}, "weight"),
        ({"prompt": "a", "ttl_s": -1}, "ttl_s"),
        ({"prompt": "a", "model": "other"}, "model"),
        ({"prompt": "a", "forever": True}, "forever"),
    ],
)
async def test_order_that_makes_no_sense_is_refused_by_field(admin: tuple[Harness, str], body: Any, field: str) -> None:
    status, answer = await put(admin, body)
    assert status in (400, 404)
    assert answer["error"]["param"] == field
    assert admin[0].decode.kept == []
