"""Short prompts go to decode as text, and the worker says how many tokens they have; what needs ids gets them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import Role
from farfill.wire.control import MAX_TEXT_BYTES, ErrorBody
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
COUNTED = 21
"""Special tokens are one each, everything else is a token a byte."""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    routing = {"remote_prefill_threshold_tokens": 300, "allow_placement_override": True}
    async with running_gateway(tmp_path, routing=routing, prefill={"chunked_prefill_tokens": 200}) as harness:
        harness.decode.takes_text = True
        yield harness


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 2, **fields}


async def test_short_chat_goes_as_text_and_the_worker_counts(gateway: Harness):
    status, body, response = await gateway.post(CHAT, chat())
    assert status == 200
    command = gateway.decode.decodes[-1]
    assert (command.text, command.token_ids, command.add_special_tokens) == (RENDERED, [], False)
    assert body["usage"]["prompt_tokens"] == len(RENDERED.encode())  # as this worker counts
    record = await gateway.record(response.headers["X-Request-Id"])
    assert record["prompt_tokens"] == len(RENDERED.encode())
    assert (record["placement"], record["reason"]) == ("local", "below_threshold")
    assert gateway.observer.finished[-1].prompt_tokens == len(RENDERED.encode())
    assert gateway.service.work.tokens(gateway.decode.instance) == 0


async def test_streamed_chat_tells_the_workers_count(gateway: Harness):
    fields = chat(stream=True, stream_options={"include_usage": True})
    async with gateway.http.post(gateway.base + CHAT, json=fields) as response:
        events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
    assert json.loads(events[-1])["usage"]["prompt_tokens"] == len(RENDERED.encode())


async def test_completion_goes_as_text_with_what_the_tokenizer_adds(gateway: Harness):
    status, _, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": ["hi", "ho"]})
    assert status == 200
    told = sorted((c.text, c.token_ids, c.add_special_tokens) for c in gateway.decode.decodes)
    assert told == [("hi", [], True), ("ho", [], True)]


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT, {"messages": USER}, COUNTED),  # the output gets the rest of the context
        (CHAT, {**chat(), "return_token_ids": True}, COUNTED),
        (CHAT, {**chat(), "max_tokens": 512 - COUNTED}, COUNTED),  # fits, though its bound would not
        (CHAT, {**chat(), "messages": [{"role": "user", "content": "x" * 200}]}, COUNTED - 2 + 200),
        (COMPLETIONS, {"prompt": "hi", "echo": True}, 3),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
    ],
)
async def test_ids_are_sent_where_they_are_needed(gateway: Harness, path: str, fields: dict[str, Any], tokens: int):
    status, body, _ = await gateway.post(path, {"model": "tiny", **fields})
    assert status == 200, body
    command = gateway.decode.decodes[-1]
    assert (command.text, len(command.token_ids)) == ("", tokens)
    assert body["usage"]["prompt_tokens"] == tokens


async def test_forced_placement_and_workers_without_tokenizer_get_ids(gateway: Harness):
    await gateway.post(CHAT, chat(), **{"x-farfill-force-placement": "local"})
    gateway.decode.takes_text = False
    _, body, _ = await gateway.post(CHAT, chat())
    assert [(c.text, len(c.token_ids)) for c in gateway.decode.decodes] == [("", COUNTED)] * 2
    assert body["usage"]["prompt_tokens"] == COUNTED


async def test_long_text_is_ids_however_long_chunks_are(tmp_path: Path):
    routing = {"remote_prefill_threshold_tokens": 100_000}
    async with running_gateway(
        tmp_path, context_tokens=50_000, routing=routing, prefill={"chunked_prefill_tokens": 50_000}
    ) as h:
        h.decode.takes_text = True
        for size in (MAX_TEXT_BYTES - 2, MAX_TEXT_BYTES):
            status, body, _ = await h.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * size})
            assert status == 200, body
        assert [(len(c.text), len(c.token_ids)) for c in h.decode.decodes] == [
            (MAX_TEXT_BYTES - 2, 0),
            (0, MAX_TEXT_BYTES + 1),
        ]


async def test_searched_threshold_sees_exact_lengths(tmp_path: Path):
    async with running_gateway(tmp_path, routing={"threshold": "auto"}, prefill={"chunked_prefill_tokens": 200}) as h:
        h.decode.takes_text = True
        await h.post(CHAT, chat())
        assert len(h.decode.decodes[-1].token_ids) == COUNTED


async def test_second_worker_without_tokenizer_gets_ids(gateway: Harness):
    other = StubWorker("decode-other", Role.DECODE, gateway.decode.transfers)
    await other.start()
    try:
        gateway.membership.workers.append(other)
        error = ErrorBody(reason="engine_error", message="out of order", retryable=True)
        gateway.decode.refuse = (503, error)
        other.refuse = None
        for _ in range(4):  # whichever is asked first
            status, body, _ = await gateway.post(CHAT, chat())
            assert (status, body["usage"]["prompt_tokens"]) == (200, COUNTED)
        assert {(c.text, len(c.token_ids)) for c in other.decodes} == {("", COUNTED)}
    finally:
        await other.stop()


async def test_prompt_that_cannot_fit_is_the_same_error(gateway: Harness):
    status, body, _ = await gateway.post(CHAT, chat(max_tokens=512))
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert f"the prompt has {COUNTED}" in body["error"]["message"]
    assert not gateway.decode.decodes


async def test_tenant_pays_for_what_the_worker_counted(tmp_path: Path):
    tenants = {"*": {"tokens_per_s": 1.0, "burst_s": 100.0}}
    async with running_gateway(
        tmp_path, admission={"tenants": tenants}, prefill={"chunked_prefill_tokens": 200},
        routing={"remote_prefill_threshold_tokens": 300},
    ) as h:  # fmt: skip
        h.decode.takes_text = True
        status, body, _ = await h.post(CHAT, chat())
        assert (status, body["usage"]["total_tokens"]) == (200, len(RENDERED.encode()) + 2)
        status, body, _ = await h.post(CHAT, chat())
        assert (status, body["error"]["code"]) == (429, "tenant_tokens")
