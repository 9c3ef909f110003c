"""The API at the level of HTTP: statuses, error shape, request ids, the small endpoints."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import InstanceState
from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GOOD = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 1}).encode()
CALL_ID = "messages[0].tool_call_id"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path, gateway={"max_body_mb": 1}) as harness:
        yield harness


def assert_error(body: Any, *, code: str, param: str | None, contains: str = "") -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert contains in body["error"]["message"]


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA_PARAM = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "code", "param", "contains"),
    [
        ({"temprature": 1}, "unknown_field", "temprature", "did you mean 'temperature'"),
        ({"tools": [{"type": "function"}]}, "invalid_request", "tools[0].function", "missing"),
        ({"tools": [{"type": "web_search"}]}, "unsupported", "tools[0]", "web_search"),
        ({"tools": TOOLS}, "unsupported", "tools", "takes no tools"),
        ({"tools": TOOLS * 2}, "invalid_request", "tools", "same name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "invalid_request",
            "tools[0].function.name",
            "",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "invalid_request", "tool_choice", "any"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "invalid_request",
            "tool_choice",
            "'g'",
        ),
        ({"functions": [{"name": "f"}]}, "unsupported", "functions", "not supported"),
        ({"response_format": {"type": "xml"}}, "unsupported", "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "invalid_request", SCHEMA_PARAM, "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "grammar",
            SCHEMA_PARAM,
            "not",
        ),
        ({"guided_regex": "(?=a)"}, "grammar", "guided_regex", "look-around"),
        ({"guided_json": "{"}, "invalid_request", "guided_json", "JSON schema"),
        ({"guided_grammar": "start: nowhere"}, "grammar", "guided_grammar", "nowhere"),
        ({"structured_outputs": {"choice": []}}, "invalid_request", "structured_outputs.choice", ""),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "invalid_request", "guided_choice", "give one"),
        ({"bad_words": [" "]}, "invalid_request", "bad_words", "blank"),
        ({"allowed_token_ids": []}, "invalid_request", "allowed_token_ids", "empty"),
        ({"reasoning_effort": "high"}, "unsupported", "reasoning_effort", "no reasoning_effort"),
        (
            {"chat_template_kwargs": {"enable_thinking": 1}},
            "invalid_request",
            "chat_template_kwargs.enable_thinking",
            "",
        ),
        ({"audio": {"voice": "x"}}, "unsupported", "audio", ""),
        ({"temperature": "hot"}, "invalid_request", "temperature", "float"),
        ({"temperature": -1}, "invalid_request", "temperature", "between 0 and 2"),
        ({"top_p": 0}, "invalid_request", "top_p", ""),
        ({"n": 0}, "invalid_request", "n", ""),
        ({"max_tokens": 0}, "invalid_request", "max_tokens", "at least 1"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "invalid_request", "max_completion_tokens", "differ"),
        ({"min_tokens": 5, "max_tokens": 4}, "invalid_request", "min_tokens", ""),
        ({"stop": [""]}, "invalid_request", "stop", ""),
        ({"stop": ["a"] * 17}, "invalid_request", "stop", "17"),
        ({"logit_bias": {"9999": 1}}, "invalid_request", "logit_bias", "9999"),
        *(
            ({"logit_bias": {key: 1}}, "invalid_request", "logit_bias", "not a token id")
            for key in ("\uff11", "\u0665", "9" * 5000, "0" * 30, "+1", " 1", "1_0", "")
        ),
        *(
            ({name: nested(200)}, "invalid_request", name, "nested")
            for name in ("metadata", "store", "prompt_cache_key", "safety_identifier", "service_tier")
        ),
        *(
            ({"messages": [{"role": "tool", "content": "x", **fields}]}, "invalid_request", CALL_ID, "missing")
            for fields in ({}, {"tool_call_id": None}, {"tool_call_id": ""})
        ),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs", ""),
        ({"stop_token_ids": [-1]}, "invalid_request", "stop_token_ids", ""),
        ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"nope": 1}}, "invalid_request", "stream_options", "nope"),
        ({"cache_salt": ""}, "invalid_request", "cache_salt", ""),
        ({"request_id": "a b"}, "invalid_request", "request_id", ""),
        ({"messages": []}, "invalid_request", "messages", "empty"),
        ({"messages": [{"role": "function", "content": "x"}]}, "unsupported", "messages[0].role", "function"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "invalid_request",
            "messages[0].tool_calls",
            "only an assistant",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}
                ]
            },
            "invalid_request",
            "messages[0].tool_calls[0].function.arguments",
            "JSON",
        ),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "invalid_request", "messages[0]", "colour"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported_media",
            "messages[0].content[0]",
            "text only",
        ),
        ({"model": None}, "invalid_request", "model", "missing"),
        ({"max_tokens": 10_000}, "context_length_exceeded", "messages", "512"),
    ],
)
async def test_bad_chat_field_is_named(
    gateway: Harness, fields: dict[str, Any], code: str, param: str, contains: str
) -> None:
    status, body, _ = await gateway.post(CHAT, {"model": "tiny", "messages": USER, **fields})
    assert status == 400
    assert_error(body, code=code, param=param, contains=contains)
    assert gateway.decode.decodes == []
    assert gateway.observer.finished[-1].outcome == "client_error"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"best_of": 2}, "unsupported", "best_of"),
        ({"suffix": "x"}, "unsupported", "suffix"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "invalid_request", "max_completion_tokens"),
        ({"messages": USER}, "unknown_field", "messages"),
        ({"echo": True, "logprobs": 1}, "unsupported", "logprobs"),
        ({"logprobs": 21}, "invalid_request", "logprobs"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": {}}, "invalid_request", "prompt"),
        ({"prompt": [1, "a"]}, "invalid_request", "prompt"),
        ({"prompt": [9999]}, "invalid_request", "prompt"),
        ({"prompt": [[]]}, "invalid_request", "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 129}, "invalid_request", "prompt"),
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"prompt": "x" * 511, "max_tokens": 1}, "context_length_exceeded", "prompt"),
    ],
)
async def test_bad_completion_field_is_named(gateway: Harness, fields: dict[str, Any], code: str, param: str) -> None:
    status, body, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "hi", **fields})
    assert status == 400
    assert_error(body, code=code, param=param)
    assert gateway.decode.decodes == []


async def test_neutral_values_and_harmless_fields_are_accepted(gateway: Harness) -> None:
    neutral = {
        "tools": [], "response_format": {"type": "text"}, "stop": None, "n": None, "user": "u", "store": True,
        "metadata": {"a": "b"}, "logprobs": None, "seed": None, "service_tier": "auto", "max_tokens": 1,
    }  # fmt: skip
    echoed = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "audio": None}
    status, body, _ = await gateway.post(CHAT, {"model": "tiny", "messages": [*USER, echoed, *USER], **neutral})
    assert status == 200, body


async def test_default_length_is_cut_to_the_context(gateway: Harness) -> None:
    status, _, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 506})
    assert status == 200
    assert gateway.decode.decodes[0].sampling.max_tokens == 5


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'"x"', b'{"a": \xff}', b'{"model": "tiny", "messages": [}'])
async def test_bad_json_is_400(gateway: Harness, body: bytes) -> None:
    status, answer, _ = await gateway.post(CHAT, body)
    assert status == 400
    assert answer["error"]["code"] == "invalid_json"


async def test_deeply_nested_json_is_400(gateway: Harness) -> None:
    status, answer, _ = await gateway.post(CHAT, b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "m" * 100_000}, 404),
        ({"x" * 100_000: 1}, 400),
        ({"messages": [{"role": "r" * 100_000, "content": "x"}]}, 400),
        ({"messages": [{"role": "user", "content": [{"type": "t" * 100_000}]}]}, 400),
        ({"response_format": {"type": "f" * 100_000}}, 400),
        ({"logit_bias": {"b" * 100_000: 1}}, 400),
        ({"tools": TOOLS, "tool_choice": "c" * 100_000}, 400),
    ],
)
async def test_error_does_not_echo_a_book(gateway: Harness, fields: dict[str, Any], status: int) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **fields}
    got, body, _ = await gateway.post(CHAT, asked)
    assert got == status, body
    assert len(json.dumps(body)) < 3000


async def test_what_has_no_effect_may_have_brackets_and_depth(gateway: Harness) -> None:
    fields = {"metadata": {"a": "[{" * 500, 'b"': '\\"[' * 200, "c": [[], {}] * 200}, "store": nested(90)}
    status, body, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "x", "max_tokens": 1, **fields})
    assert status == 200, body


@pytest.mark.parametrize("text", ["\\ud800", "a\\udc00b", "\\ud800\\u0041", "\\udfff\\ud800", "\\\\\\ud900"])
@pytest.mark.parametrize("field", ["stop", "prompt", "metadata"])
async def test_half_a_character_is_told_as_such(gateway: Harness, field: str, text: str) -> None:
    rest = "" if field == "prompt" else '"prompt": "x", '
    body = f'{{"model": "tiny", {rest}"{field}": "{text}"}}'.encode()
    status, answer, _ = await gateway.post(COMPLETIONS, body)
    assert status == 400
    assert_error(answer, code="invalid_json", param=None, contains="lone surrogate")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/v1/models", "/nowhere"])
@pytest.mark.parametrize("expect", ["200-ok", "x", "100-continue, x"])
async def test_expectation_that_is_not_understood_has_the_same_shape(gateway: Harness, path: str, expect: str) -> None:
    status, body, response = await gateway.post(path, GOOD, Expect=expect)
    assert status == 417
    assert_error(body, code="expectation_failed", param=None, contains=expect)
    assert response.headers["X-Request-Id"]


async def test_continue_may_be_expected(gateway: Harness) -> None:
    status, body, _ = await gateway.post(COMPLETIONS, GOOD, Expect="100-continue")
    assert status == 200, body


@pytest.mark.parametrize(
    ("prompts", "n"),
    [(128, 2), (2, 65), (128, 128), (43, 3)],
)
async def test_choices_of_one_request_are_bounded(gateway: Harness, prompts: int, n: int) -> None:
    asked = {"model": "tiny", "prompt": ["hi"] * prompts, "n": n, "max_tokens": 1}
    status, body, _ = await gateway.post(COMPLETIONS, asked)
    assert status == 400
    assert_error(body, code="invalid_request", param="n", contains=f"{prompts} prompts times n: {n}")
    assert not gateway.decode.decodes


async def test_as_many_choices_as_are_allowed_come(gateway: Harness) -> None:
    status, body, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": ["a", "b"], "n": 64, "max_tokens": 1})
    assert status == 200, body
    assert len(body["choices"]) == 128


async def test_large_body_is_413(gateway: Harness) -> None:
    status, body, _ = await gateway.post(CHAT, b" " * (2 << 20))
    assert status == 413
    assert_error(body, code="body_too_large", param=None, contains="max_body_mb: 1")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
@pytest.mark.parametrize(
    ("encoding", "garbage"),
    [
        ("gzip", b"\xffnot compressed"),
        ("gzip", gzip.compress(b"x" * 1000)[:10] + b"\xff" * 100),
        ("deflate", b"\xffnot compressed"),
        ("deflate", zlib.compress(b"x" * 1000)[:-7]),
        ("gzip", gzip.compress(GOOD)[:-9]),
        ("gzip", gzip.compress(GOOD)[:-1]),
        ("gzip", gzip.compress(GOOD) + b"more"),
        ("gzip", gzip.compress(GOOD) + gzip.compress(GOOD)[:-3]),
        ("deflate", zlib.compress(GOOD) + b"more"),
    ],
)
async def test_body_that_is_not_compressed_as_told_is_400(
    gateway: Harness, caplog: pytest.LogCaptureFixture, path: str, encoding: str, garbage: bytes
) -> None:
    status, body, response = await gateway.post(path, garbage, **{"Content-Encoding": encoding})
    assert status == 400
    assert_error(body, code="invalid_request", param="Content-Encoding", contains="cannot be decoded")
    assert response.headers["X-Request-Id"]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(GOOD)),
        ("GZIP", gzip.compress(GOOD)),
        ("identity, x-gzip", gzip.compress(GOOD)),
        ("gzip", gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:])),
        ("deflate", zlib.compress(GOOD)),
        ("deflate", zlib.compress(GOOD, wbits=-15)),
        ("identity", GOOD),
    ],
)
async def test_compressed_body_is_understood(gateway: Harness, encoding: str, body: bytes) -> None:
    status, answer, _ = await gateway.post(COMPLETIONS, body, **{"Content-Encoding": encoding})
    assert status == 200, answer


@pytest.mark.parametrize("encoding", ["foo", "foo, gzip", "gzip, foo", "gzip, gzip", "br", "zstd", "g\u00fczip"])
async def test_unknown_coding_is_400_whatever_the_body_is(gateway: Harness, encoding: str) -> None:
    for body in (GOOD, gzip.compress(GOOD)):
        status, answer, _ = await gateway.post(COMPLETIONS, body, **{"Content-Encoding": encoding})
        assert status == 400, answer
        assert_error(answer, code="unsupported", param="Content-Encoding", contains="gzip and deflate")


async def test_body_that_is_large_when_decoded_is_413(gateway: Harness) -> None:
    status, body, _ = await gateway.post(CHAT, gzip.compress(b" " * (2 << 20)), **{"Content-Encoding": "gzip"})
    assert status == 413
    assert_error(body, code="body_too_large", param=None, contains="max_body_mb: 1")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"FOO /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 10_000 + b"\r\n\r\n",
        b"not http at all\r\n\r\n",
        b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_malformed_http_is_400_in_the_same_shape_and_no_error_of_ours(
    gateway: Harness, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    # Not the first request of the connection: aiohttp by itself is silent only there.
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.base.rpartition(":")[2]))
    try:
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'"ok"}')
        writer.write(request_bytes)
        head, _, answer = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 400 ") or head.startswith(b"HTTP/1.0 400 ")
    assert b"\r\nx-request-id: " in head.lower()
    assert_error(json.loads(answer), code="bad_request", param=None)
    assert " " in json.loads(answer)["error"]["message"]
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_wrong_method_is_405_with_allow_and_unknown_path_404(gateway: Harness) -> None:
    async with gateway.http.get(gateway.base + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert_error(await response.json(), code="method_not_allowed", param=None)
    status, body, _ = await gateway.get("/v1/nothing")
    assert status == 404
    assert_error(body, code="not_found", param=None, contains="/v1/nothing")


async def test_request_id_is_kept_generated_or_refused(gateway: Harness) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
    _, answer, response = await gateway.post(COMPLETIONS, body, **{"X-Request-Id": "abc-1"})
    assert response.headers["X-Request-Id"] == "abc-1"
    assert answer["id"] == "cmpl-abc-1"
    assert gateway.decode.decodes[-1].request_id == "abc-1"
    _, _, response = await gateway.post(COMPLETIONS, {**body, "request_id": "from-body"})
    assert response.headers["X-Request-Id"] == "from-body"
    _, _, response = await gateway.post(COMPLETIONS, body)
    assert len(response.headers["X-Request-Id"]) == 32
    status, answer, response = await gateway.post(COMPLETIONS, body, **{"X-Request-Id": "no spaces"})
    assert status == 400
    assert_error(answer, code="invalid_request", param="X-Request-Id")
    status, _, response = await gateway.post(COMPLETIONS, b"{", **{"X-Request-Id": "abc-2"})
    assert (status, response.headers["X-Request-Id"]) == (400, "abc-2")


async def test_tokenize_and_detokenize(gateway: Harness) -> None:
    _, body, _ = await gateway.post("/tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"]) == 7
    assert body["max_model_len"] == 512
    _, back, _ = await gateway.post("/detokenize", {"tokens": body["tokens"][1:]})
    assert back == {"prompt": "héllo"}
    _, chat, _ = await gateway.post("/tokenize", {"model": "tiny", "messages": USER})
    await gateway.post(CHAT, {"model": "tiny", "messages": USER, "max_tokens": 1})
    assert chat["tokens"] == gateway.decode.decodes[-1].token_ids
    status, error, _ = await gateway.post("/detokenize", {"tokens": [100_000]})
    assert status == 400
    assert_error(error, code="invalid_request", param="tokens")
    assert (await gateway.post("/tokenize", {}))[0] == 400
    assert (await gateway.post("/tokenize", {"prompt": "x", "model": "other"}))[0] == 404


async def test_health_version_metrics(gateway: Harness) -> None:
    assert (await gateway.get("/health"))[0] == 200
    assert (await gateway.get("/live"))[0] == 200
    assert (await gateway.get("/version"))[1]["version"]
    async with gateway.http.get(gateway.base + "/metrics") as response:
        assert response.content_type == "text/plain"
        assert await response.text() == "farfill_up 1\n"


async def test_ready_needs_a_ready_decode_worker(gateway: Harness) -> None:
    assert (await gateway.get("/ready"))[0] == 200
    gateway.decode.state = InstanceState.DRAINING
    status, body, _ = await gateway.get("/ready")
    assert status == 503
    assert "decode" in body["missing"]


async def test_no_decode_worker_is_503_with_retry_after(gateway: Harness) -> None:
    gateway.membership.workers.clear()
    status, body, response = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "hi"})
    assert status == 503
    assert_error(body, code="no_decode_instance", param=None)
    assert int(response.headers["Retry-After"]) >= 1


async def test_worker_without_room_is_503_with_its_retry_after(gateway: Harness) -> None:
    refusal = ErrorBody(reason="kv_memory", message="full", retryable=True, retry_after_s=2.5)
    gateway.decode.refuse = (503, refusal)
    status, body, response = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "hi"})
    assert status == 503
    assert_error(body, code="kv_memory", param=None)
    assert response.headers["Retry-After"] == "3"
    assert gateway.observer.finished[-1].outcome == "rejected"


async def test_too_many_requests_are_429_and_slots_come_back(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, gateway={"max_concurrent_requests": 1}, admission={"max_queue": 0}) as gateway:
        gateway.decode.hold_before_start = asyncio.Event()
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
        running = asyncio.create_task(gateway.post(COMPLETIONS, body))
        await asyncio.wait_for(gateway.decode.received.acquire(), 10)
        status, answer, response = await gateway.post(COMPLETIONS, body)
        assert status == 429
        assert answer["error"]["type"] == "rate_limit_error"
        assert int(response.headers["Retry-After"]) >= 1
        gateway.decode.hold_before_start.set()
        assert (await running)[0] == 200
        assert (await gateway.post(COMPLETIONS, body))[0] == 200


async def test_base_model_refuses_chat_and_names_completions(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, chat_template=False) as gateway:
        status, body, _ = await gateway.post(CHAT, {"model": "tiny", "messages": USER})
        assert status == 400
        assert_error(body, code="no_chat_template", param="messages", contains="/v1/completions")
        assert (await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "hi", "max_tokens": 1}))[0] == 200


async def test_request_over_its_deadline_is_504(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, gateway={"request_timeout_s": 0.2}) as gateway:
        gateway.decode.hold_before_start = asyncio.Event()
        status, body, _ = await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "hi"})
        assert status == 504
        assert_error(body, code="request_timeout", param=None)
        await asyncio.wait_for(gateway.decode.withdrawn.acquire(), 10)


async def test_stream_over_its_deadline_ends_with_an_error_event(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, gateway={"request_timeout_s": 0.5}) as gateway:
        gateway.decode.hold_after_first = asyncio.Event()
        body = {"model": "tiny", "prompt": "hi", "stream": True}
        async with gateway.http.post(gateway.base + COMPLETIONS, json=body) as response:
            assert response.status == 200
            events = [line for line in (await response.text()).split("\n\n") if line]
        assert "[DONE]" not in events[-1]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"
        await asyncio.wait_for(gateway.decode.withdrawn.acquire(), 10)
