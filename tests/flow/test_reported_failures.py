"""Failures that users of other routers reported, asked of this gateway. docs/faults.md names the reports."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farfill.wire.control import ErrorBody, PrefillCommand
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import REPORT

ROOT = Path(__file__).parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT, LONG = "hi", "x" * 100
DEADLINE_S = 10.0
PICKLES = re.compile(
    r"^\s*(?:import|from)\s+(?:_?pickle|cloudpickle|dill|shelve|marshal|joblib)\b|\b(?:send|recv)_pyobj\b", re.MULTILINE
)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path, routing={"circuit_breaker": {"min_requests": 3}}) as running:
        yield running


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}


async def answered(gateway: Harness, sent: dict[str, Any], **headers: str) -> tuple[dict[str, Any], Any]:
    status, answer, response = await gateway.post(COMPLETIONS, sent, **headers)
    assert status == 200, answer
    return answer, response.headers


@pytest.mark.parametrize("status", [400, 403, 404, 409, 413, 422])
async def test_clients_mistakes_never_open_a_breaker(gateway: Harness, status: int) -> None:
    gateway.prefill.refuse = (status, ErrorBody(reason="invalid_request", message="your fault"))
    for i in range(12):
        _, headers = await answered(gateway, body(f"{i}" * 60))
        assert headers["x-farfill-reason"] == "above_threshold"
    assert gateway.service.health.state(gateway.prefill.instance) == "closed"
    assert gateway.service.health.site_state("far") == "closed"
    gateway.prefill.refuse = None
    _, headers = await answered(gateway, body(LONG))
    assert headers["x-farfill-placement"] == "remote"


async def test_prefill_of_seconds_runs_into_no_limit_nobody_set(gateway: Harness) -> None:
    """Longer than the two seconds that were built in elsewhere; `kv_transfer.timeout_ms` is 4 s here."""
    gateway.prefill.hold_prefill = asyncio.Event()
    asyncio.get_running_loop().call_later(2.2, gateway.prefill.hold_prefill.set)
    _, headers = await answered(gateway, body(LONG))
    assert (headers["x-farfill-placement"], headers.get("x-farfill-fallback")) == ("remote", None)


async def test_usage_of_a_far_prefill_tells_what_the_far_cache_had(gateway: Harness, monkeypatch: Any) -> None:
    """Neither all of the prompt, because decode received it whole, nor both sides' hits added up."""
    monkeypatch.setattr("support.stub_worker.REPORT", msgspec.structs.replace(REPORT, cached_tokens=48))
    gateway.decode.cached_tokens = 16
    answer, headers = await answered(gateway, body(LONG))
    assert headers["x-farfill-placement"] == "remote"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert answer["usage"]["prompt_tokens"] == len(LONG) + 1


async def test_far_and_near_answers_have_the_same_usage(gateway: Harness) -> None:
    gateway.decode.texts = ["<think>", "so", "</think>", "yes"]
    usages = []
    for forced in ("remote", "local"):
        for stream in (False, True):
            sent = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{forced}{stream}" * 20}],
                "max_tokens": 4,
                "stream": stream,
            }
            if stream:
                sent["stream_options"] = {"include_usage": True}
            headers = {"x-farfill-force-placement": forced}
            async with gateway.http.post(gateway.base + CHAT, json=sent, headers=headers) as response:
                assert response.headers["x-farfill-placement"] == forced
                text = await response.text()
            lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
            usages.append(msgspec.json.decode(lines[-1])["usage"]["completion_tokens"])
    assert usages == [4] * 4


@pytest.mark.parametrize("forced", ["remote", "local"])
@pytest.mark.parametrize("tokens", [1, 2])
async def test_one_token_asked_for_is_one_token(gateway: Harness, forced: str, tokens: int) -> None:
    answer, _ = await answered(gateway, body(LONG, max_tokens=tokens), **{"x-farfill-force-placement": forced})
    assert answer["usage"]["completion_tokens"] == tokens
    assert gateway.decode.decodes[-1].sampling.max_tokens == tokens


async def test_no_token_asked_for_is_the_clients_mistake(gateway: Harness) -> None:
    status, answer, _ = await gateway.post(COMPLETIONS, body(LONG, max_tokens=0))
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert gateway.decode.decodes == []


async def test_sampling_limits_stay_with_decode(gateway: Harness) -> None:
    """`min_tokens` with a prefill leg of one token was a 500: here no limit of sampling goes far at all."""
    await answered(gateway, body(LONG, max_tokens=6, min_tokens=5, stop=["zz"]))
    sampling = gateway.decode.decodes[-1].sampling
    assert (sampling.min_tokens, sampling.max_tokens, sampling.stop) == (5, 6, ["zz"])
    assert "sampling" not in PrefillCommand.__struct_fields__
    assert gateway.prefill.prefills[-1].token_ids == gateway.decode.decodes[-1].token_ids


async def test_prompt_logprobs_are_refused_by_name_and_crash_nothing(gateway: Harness) -> None:
    status, answer, _ = await gateway.post(COMPLETIONS, body(LONG, prompt_logprobs=2))
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    await answered(gateway, body(LONG, prompt_logprobs=None))


async def test_time_to_the_first_token_is_the_clients_and_split_by_step(gateway: Harness) -> None:
    gateway.prefill.hold_prefill = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, gateway.prefill.hold_prefill.set)
    began_s = asyncio.get_running_loop().time()
    async with gateway.http.post(
        gateway.base + COMPLETIONS, json=body(LONG, stream=True), headers={"X-Request-Id": "timed"}
    ) as response:
        await response.content.readuntil(b"\n\n")
        seen_s = asyncio.get_running_loop().time() - began_s
        await response.read()
    record = await gateway.record("timed")
    assert 0.25 < record["ttft_s"] <= seen_s
    stages = record["stages_s"]
    assert stages["dispatch"] > 0.25, "what the far side took"
    assert sum(stages[name] for name in ("tokenize", "hash", "queue", "dispatch")) <= record["ttft_s"]


async def test_refusal_of_decode_lets_the_far_side_go(gateway: Harness) -> None:
    gateway.prefill.hold_prefill = asyncio.Event()
    gateway.decode.hold_before_start = asyncio.Event()
    asked = asyncio.create_task(gateway.post(COMPLETIONS, body(LONG)))
    async with asyncio.timeout(DEADLINE_S):
        await gateway.prefill.received.acquire()
        gateway.decode.texts = []
        gateway.decode.transfers.end(gateway.prefill.prefills[0].ticket, None)
        gateway.decode.hold_before_start.set()
        status, _, _ = await asked
        await gateway.prefill.withdrawn.acquire()
    assert status >= 500


@pytest.mark.parametrize("stream", [False, True])
async def test_empty_completion_is_never_a_200(gateway: Harness, stream: bool) -> None:
    gateway.decode.texts = []
    status, answer, _ = await gateway.post(COMPLETIONS, body(SHORT, stream=stream))
    assert (status, answer["error"]["code"]) == (503, "protocol_violation")
    assert "without a token" in answer["error"]["message"]


async def test_one_trace_goes_over_all_hops(gateway: Harness) -> None:
    await answered(gateway, body(LONG), traceparent=TRACE)
    assert gateway.decode.decodes[0].traceparent == gateway.prefill.prefills[0].traceparent == TRACE
    await answered(gateway, body(SHORT), traceparent="00-nonsense-01")
    assert gateway.decode.decodes[1].traceparent == ""


async def test_silent_recompute_is_counted_with_its_reason(gateway: Harness) -> None:
    gateway.prefill.refuse = (500, ErrorBody(reason="engine_error", message="broke"))
    await answered(gateway, body(LONG))
    summary = gateway.observer.finished[-1]
    assert (summary.placement, summary.fallback, summary.outcome) == ("local", "prefill_failed", "ok")
    assert gateway.observer.legs == ["prefill_failed"]


def test_nothing_on_a_wire_is_pickled() -> None:
    """Every known remote code execution of serving engines over their own sockets went through pickle."""
    found = [path for path in (ROOT / "src").rglob("*.py") if PICKLES.search(path.read_text())]
    assert found == []
    assert PICKLES.search("    from pickle import loads\n")
    assert PICKLES.search("socket.recv_pyobj()")
