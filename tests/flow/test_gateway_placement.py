"""Placement, far prefill, fallback, retries, breaker and cancellation, with stub workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from farfill.core.cluster import InstanceState, Role
from farfill.policy.breaker import Outcome
from farfill.wire.control import ErrorBody
from support.gateway_harness import Harness, running_gateway
from support.stub_worker import StubWorker

COMPLETIONS = "/v1/completions"
LONG = "x" * 100
SHORT = "hi"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_gateway(tmp_path, kv_transfer={"timeout_ms": 2000}) as harness:
        yield harness


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 2, **more}


async def complete(gateway: Harness, prompt: str, **headers: str) -> tuple[dict[str, Any], dict[str, str]]:
    status, answer, response = await gateway.post(COMPLETIONS, body(prompt), **headers)
    assert status == 200, answer
    return answer, {k.lower(): v for k, v in response.headers.items()}


async def has(semaphore: asyncio.Semaphore) -> None:
    await asyncio.wait_for(semaphore.acquire(), 10)


async def idle(gateway: Harness) -> None:
    """Wait until the gateway holds nothing of any request."""

    async def settled() -> None:
        work, service = gateway.service.work, gateway.service
        while (
            len(service.background)
            or service.admission.in_progress
            or any(work.requests(w.instance) or work.tokens(w.instance) for w in gateway.membership.workers)
        ):
            await asyncio.sleep(0)

    await asyncio.wait_for(settled(), 10)


async def test_short_prompt_stays_local(gateway: Harness) -> None:
    _, headers = await complete(gateway, SHORT)
    assert headers["x-farfill-placement"] == "local"
    assert headers["x-farfill-reason"] == "below_threshold"
    assert headers["x-farfill-decode-instance"] == "decode-near"
    assert "x-farfill-prefill-instance" not in headers
    assert "x-farfill-fallback" not in headers
    assert gateway.prefill.prefills == []
    assert gateway.decode.decodes[0].ticket == ""


async def test_long_prompt_goes_far_and_both_legs_get_the_same_ticket(gateway: Harness) -> None:
    answer, headers = await complete(gateway, LONG, **{"X-Request-Id": "r1"})
    assert answer["choices"][0]["text"] == "w0 w1 "
    assert headers["x-farfill-placement"] == "remote"
    assert headers["x-farfill-reason"] == "above_threshold"
    assert headers["x-farfill-prefill-instance"] == "prefill-far"
    decode, prefill = gateway.decode.decodes[0], gateway.prefill.prefills[0]
    assert decode.ticket == prefill.ticket != ""
    assert decode.token_ids == prefill.token_ids
    assert decode.cache_salt == prefill.cache_salt == "default:"
    assert prefill.target == "127.0.0.1:9"
    record = await gateway.record("r1")
    assert (record["placed"], record["placement"], record["fallback"]) == ("remote", "remote", "none")
    assert record["prefill"]["wire_bytes"] == 1000
    assert record["start"]["prefilled_at"] == "remote"
    assert (record["prompt_tokens"], record["completion_tokens"]) == (101, 2)
    assert record["uncached_tokens"] == 100
    assert 0 < record["ttft_s"] <= record["duration_s"]
    assert record["tpot_s"] >= 0
    assert set(record["stages_s"]) == {"tokenize", "hash", "queue", "dispatch", "stream"}
    assert "xxx" not in str(record)
    await idle(gateway)
    assert gateway.observer.legs == ["ok"]
    summary = gateway.observer.finished[0]
    assert (summary.placement, summary.outcome, summary.model) == ("remote", "ok", "tiny")


async def test_streaming_does_not_wait_for_the_prefill_report(gateway: Harness) -> None:
    gateway.prefill.hold_prefill = asyncio.Event()

    async def read() -> tuple[int, str]:
        async with gateway.http.post(gateway.base + COMPLETIONS, json=body(LONG, stream=True)) as response:
            return response.status, await response.text()

    reading = asyncio.create_task(read())
    await has(gateway.prefill.received)
    gateway.decode.transfers.end(gateway.prefill.prefills[0].ticket, None)
    status, text = await reading
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    gateway.prefill.hold_prefill.set()
    await idle(gateway)
    assert gateway.observer.legs == ["ok"]


@pytest.mark.parametrize(("force", "placement"), [("local", "local"), ("remote", "remote")])
async def test_forced_placement_is_honoured(gateway: Harness, force: str, placement: str) -> None:
    prompt = LONG if force == "local" else SHORT
    _, headers = await complete(gateway, prompt, **{"x-farfill-force-placement": force})
    assert headers["x-farfill-placement"] == placement
    assert headers["x-farfill-reason"] == f"forced_{force}"


async def test_forced_placement_is_refused_when_unknown_or_not_allowed(gateway: Harness, tmp_path: Path) -> None:
    header = {"x-farfill-force-placement": "mars"}
    status, answer, _ = await gateway.post(COMPLETIONS, body(SHORT), **header)
    assert (status, answer["error"]["param"]) == (400, "x-farfill-force-placement")
    async with running_gateway(tmp_path / "b", routing={"allow_placement_override": False}) as strict:
        status, answer, _ = await strict.post(COMPLETIONS, body(SHORT), **{"x-farfill-force-placement": "local"})
        assert (status, answer["error"]["code"]) == (400, "placement_override_not_allowed")


async def test_one_token_prompt_is_too_short_even_when_forced(gateway: Harness) -> None:
    status, _, response = await gateway.post(
        COMPLETIONS, {"model": "tiny", "prompt": [65], "max_tokens": 1}, **{"x-farfill-force-placement": "remote"}
    )
    assert status == 200
    assert response.headers["x-farfill-reason"] == "too_short"
    assert response.headers["x-farfill-placement"] == "local"


async def test_no_prefill_instance_or_other_fingerprint_keeps_it_local(gateway: Harness) -> None:
    gateway.prefill.fingerprint = "other"
    _, headers = await complete(gateway, LONG)
    assert (headers["x-farfill-placement"], headers["x-farfill-reason"]) == ("local", "fingerprint_mismatch")
    gateway.prefill.state = InstanceState.DRAINING
    _, headers = await complete(gateway, "y" * 100)
    assert (headers["x-farfill-placement"], headers["x-farfill-reason"]) == ("local", "no_prefill_instance")


async def test_repeated_prompt_is_cached_near_and_stays_local(gateway: Harness) -> None:
    await complete(gateway, LONG)
    gateway.decode.cached_tokens = 96
    answer, headers = await complete(gateway, LONG)
    assert (headers["x-farfill-placement"], headers["x-farfill-reason"]) == ("local", "below_threshold")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    # Another salt shares nothing.
    status, _, response = await gateway.post(COMPLETIONS, body(LONG, cache_salt="mine"))
    assert (status, response.headers["x-farfill-placement"]) == (200, "remote")


async def test_cached_tokens_never_exceed_the_prompt(gateway: Harness) -> None:
    gateway.decode.cached_tokens = 10_000
    answer, _ = await complete(gateway, SHORT)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"]


async def test_answers_from_lossy_kv_are_marked(gateway: Harness) -> None:
    gateway.decode.lossy = "int8"
    _, headers = await complete(gateway, LONG)
    assert headers["x-farfill-kv-lossy"] == "int8"
    _, headers = await complete(gateway, SHORT)
    assert "x-farfill-kv-lossy" not in headers


async def test_unreachable_prefill_falls_back_at_once(gateway: Harness) -> None:
    gateway.membership.workers[1] = dead = StubWorker("prefill-far", Role.PREFILL, gateway.decode.transfers)
    await dead.start()
    await dead.stop()
    _, headers = await complete(gateway, LONG, **{"X-Request-Id": "r1"})
    assert headers["x-farfill-placement"] == "local"
    assert headers["x-farfill-reason"] == "above_threshold"
    assert headers["x-farfill-fallback"] == "prefill_unreachable"
    record = await gateway.record("r1")
    assert (record["placed"], record["placement"]) == ("remote", "local")
    assert record["prefill_error"]["reason"] == "worker_unreachable"
    assert gateway.observer.finished[0].fallback == "prefill_unreachable"


@pytest.mark.parametrize(
    ("status", "error", "fallback"),
    [
        (503, ErrorBody(reason="capacity", message="full", retryable=True, retry_after_s=1), "prefill_refused"),
        (403, ErrorBody(reason="ticket_expired", message="late"), "ticket_invalid"),
        (500, ErrorBody(reason="fingerprint_mismatch", message="other model"), "fingerprint_mismatch"),
        (500, ErrorBody(reason="engine_error", message="broke"), "prefill_failed"),
        (503, ErrorBody(reason="link_lost", message="cut", retryable=True, side="link"), "link_lost"),
        (426, ErrorBody(reason="protocol_version", message="old"), "protocol"),
    ],
)
async def test_refusing_prefill_falls_back_with_its_reason(
    gateway: Harness, status: int, error: ErrorBody, fallback: str
) -> None:
    gateway.prefill.refuse = (status, error)
    _, headers = await complete(gateway, LONG)
    assert headers["x-farfill-placement"] == "local"
    assert headers["x-farfill-fallback"] == fallback
    assert gateway.decode.failures_told[0][0] == gateway.decode.decodes[0].ticket
    await idle(gateway)
    assert gateway.observer.legs == [fallback]


async def test_prefill_connection_lost_falls_back(gateway: Harness) -> None:
    gateway.prefill.drop_connections = 1
    _, headers = await complete(gateway, LONG)
    assert headers["x-farfill-fallback"] == "prefill_lost"


async def test_silent_prefill_is_given_up_when_decode_falls_back(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, kv_transfer={"timeout_ms": 200}) as gateway:
        gateway.prefill.hold_prefill = asyncio.Event()
        _, headers = await complete(gateway, LONG)
        assert headers["x-farfill-fallback"] == "transfer_timeout"
        await has(gateway.prefill.withdrawn)
        await idle(gateway)
        assert gateway.observer.legs == ["transfer_timeout"]


async def test_without_fallback_it_is_503_with_retry_after(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, routing={"fallback_to_local_prefill": False}) as gateway:
        gateway.prefill.refuse = (500, ErrorBody(reason="engine_error", message="broke"))
        status, answer, response = await gateway.post(COMPLETIONS, body(LONG))
        assert status == 503
        assert answer["error"]["code"] == "prefill_failed"
        assert int(response.headers["Retry-After"]) >= 1
        assert len(gateway.decode.decodes) == 1


@pytest.mark.parametrize("force", [{}, {"x-farfill-force-placement": "remote"}])
@pytest.mark.parametrize("obstacle", ["no_prefill_instance", "fingerprint_mismatch", "breaker_open"])
async def test_without_fallback_a_prompt_that_cannot_go_far_is_503(
    tmp_path: Path, obstacle: str, force: dict[str, str]
) -> None:
    routing = {"fallback_to_local_prefill": False, "circuit_breaker": {"min_requests": 1}}
    async with running_gateway(tmp_path, routing=routing) as gateway:
        if obstacle == "no_prefill_instance":
            gateway.membership.workers.remove(gateway.prefill)
        elif obstacle == "fingerprint_mismatch":
            gateway.prefill.fingerprint = "another"
        else:
            health = gateway.service.health
            health.end(health.begin(gateway.prefill.instance, 100), Outcome.FAILURE)
        status, answer, response = await gateway.post(COMPLETIONS, body(LONG), **force)
        assert (status, answer["error"]["code"]) == (503, obstacle)
        assert "fallback_to_local_prefill" in answer["error"]["message"]
        assert int(response.headers["Retry-After"]) >= 1
        assert gateway.decode.decodes == []
        _, headers = await complete(gateway, SHORT)
        assert headers["x-farfill-reason"] == "below_threshold"


async def test_decode_that_refuses_the_ticket_prefills_by_itself(gateway: Harness) -> None:
    gateway.decode.refuse_tickets = True
    _, headers = await complete(gateway, LONG)
    assert headers["x-farfill-placement"] == "local"
    assert headers["x-farfill-fallback"] == "ticket_invalid"
    await idle(gateway)


async def test_breaker_opens_after_failures_and_says_so(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, routing={"circuit_breaker": {"min_requests": 3, "open_s": 60.0}}) as gateway:
        gateway.prefill.refuse = (500, ErrorBody(reason="engine_error", message="broke"))
        for i in range(3):
            _, headers = await complete(gateway, f"{i}" * 100)
            assert headers["x-farfill-fallback"] == "prefill_failed"
            await idle(gateway)
        _, headers = await complete(gateway, "z" * 100)
        assert headers["x-farfill-reason"] == "breaker_open"
        assert "x-farfill-fallback" not in headers
        assert len(gateway.prefill.prefills) == 3
        _, shown, _ = await gateway.get("/v1/farfill/instances")
        assert {i["name"]: i.get("breaker") for i in shown["instances"]} == {"decode-near": None, "prefill-far": "open"}


async def test_refusals_for_lack_of_room_never_open_the_breaker(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, routing={"circuit_breaker": {"min_requests": 1}}) as gateway:
        gateway.prefill.refuse = (503, ErrorBody(reason="capacity", message="full", retryable=True, retry_after_s=1))
        reasons: list[str] = []
        for i in range(3):
            _, headers = await complete(gateway, f"{i}" * 100)
            reasons.append(headers["x-farfill-reason"])
            await idle(gateway)
        # It asked for a second's pause, and gets it, with its breaker closed.
        assert reasons == ["above_threshold", "prefill_overloaded", "prefill_overloaded"]
        assert gateway.service.health.state(gateway.prefill.instance) == "closed"


async def with_second_decode(gateway: Harness) -> StubWorker:
    second = StubWorker("decode-two", Role.DECODE, gateway.decode.transfers)
    await second.start()
    gateway.membership.workers.append(second)
    return second


@pytest.mark.parametrize("prompt", [SHORT, LONG])
async def test_failing_decode_is_replaced_once(gateway: Harness, prompt: str) -> None:
    second = await with_second_decode(gateway)
    try:
        gateway.decode.refuse = (503, ErrorBody(reason="capacity", message="full", retryable=True, retry_after_s=1))
        _, headers = await complete(gateway, prompt)
        assert headers["x-farfill-decode-instance"] == "decode-two"
        assert gateway.observer.retries == ["capacity"]
        await idle(gateway)
        if prompt is LONG:
            assert headers["x-farfill-placement"] == "remote"
            assert second.decodes[0].ticket != gateway.decode.decodes[0].ticket
    finally:
        await second.stop()


async def test_two_failing_decodes_are_503(gateway: Harness) -> None:
    second = await with_second_decode(gateway)
    try:
        refusal = (503, ErrorBody(reason="capacity", message="full", retryable=True, retry_after_s=1))
        gateway.decode.refuse = second.refuse = refusal
        status, answer, _ = await gateway.post(COMPLETIONS, body(SHORT))
        assert (status, answer["error"]["code"]) == (503, "capacity")
        assert len(gateway.decode.decodes) + len(second.decodes) == 2
    finally:
        await second.stop()


async def test_decode_connection_lost_before_start_is_tried_again(gateway: Harness) -> None:
    gateway.decode.drop_connections = 1
    _, headers = await complete(gateway, SHORT)
    assert headers["x-farfill-decode-instance"] == "decode-near"
    assert gateway.observer.retries == ["worker_lost"]


async def test_decode_down_is_503_with_retry_after(gateway: Harness) -> None:
    await gateway.decode.stop()
    status, answer, response = await gateway.post(COMPLETIONS, body(SHORT))
    assert (status, answer["error"]["code"]) == (503, "worker_unreachable")
    assert int(response.headers["Retry-After"]) >= 1


async def test_ready_is_503_while_no_decode_can_be_reached(gateway: Harness) -> None:
    await gateway.decode.stop()
    assert (await gateway.get("/ready"))[0] == 200  # the registry lists it and nobody tried yet
    await gateway.post(COMPLETIONS, body(SHORT))
    status, answer, _ = await gateway.get("/ready")
    assert status == 503
    assert "reachable" in answer["missing"]
    second = await with_second_decode(gateway)
    try:
        assert (await gateway.get("/ready"))[0] == 200
    finally:
        await second.stop()


async def test_generation_that_fails_before_anything_was_sent_is_5xx(gateway: Harness) -> None:
    gateway.decode.fail_after_events = 1
    status, answer, _ = await gateway.post(COMPLETIONS, body(SHORT, stream=True))
    assert (status, answer["error"]["code"]) == (500, "engine_error")
    gateway.decode.fail_after_events = None
    gateway.decode.cut_after_events = 2
    status, answer, _ = await gateway.post(COMPLETIONS, body(SHORT))
    assert (status, answer["error"]["code"]) == (503, "worker_lost")


async def test_stream_cut_in_the_middle_ends_with_error_and_no_done(gateway: Harness) -> None:
    gateway.decode.hold_after_first = asyncio.Event()
    gateway.decode.cut_after_events = 3
    async with gateway.http.post(gateway.base + COMPLETIONS, json=body(SHORT, stream=True, max_tokens=9)) as response:
        assert response.status == 200
        head = await response.content.readuntil(b"\n\n")
        assert b"w0 " in head
        gateway.decode.hold_after_first.set()
        rest = await response.text()
    assert '"error":{' in rest
    assert "worker_lost" in rest
    assert "[DONE]" not in rest
    await idle(gateway)
    assert gateway.observer.finished[-1].outcome == "error"


async def test_client_leaving_while_waiting_frees_both_sides(gateway: Harness) -> None:
    gateway.prefill.hold_prefill = asyncio.Event()
    request = asyncio.create_task(gateway.post(COMPLETIONS, body(LONG), **{"X-Request-Id": "gone"}))
    await has(gateway.decode.received)
    await has(gateway.prefill.received)
    request.cancel()
    await has(gateway.decode.withdrawn)
    await has(gateway.prefill.withdrawn)
    record = await gateway.record("gone")
    assert record["outcome"] == "cancelled"
    await idle(gateway)
    assert gateway.observer.finished[-1].outcome == "cancelled"
    assert gateway.observer.legs == ["cancelled"]


async def test_client_leaving_in_the_middle_of_a_stream_frees_decode(gateway: Harness) -> None:
    gateway.decode.hold_after_first = asyncio.Event()
    async with gateway.http.post(gateway.base + COMPLETIONS, json=body(SHORT, stream=True)) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await has(gateway.decode.withdrawn)
    await idle(gateway)
    assert gateway.observer.finished[-1].outcome == "cancelled"


async def test_client_hanging_up_at_done_has_cancelled_nothing(gateway: Harness) -> None:
    for _ in range(20):
        async with gateway.http.post(gateway.base + COMPLETIONS, json=body(LONG, stream=True)) as response:
            await response.content.readuntil(b"data: [DONE]\n\n")
            response.close()
    await idle(gateway)
    assert {summary.outcome for summary in gateway.observer.finished} == {"ok"}


async def test_one_failing_prompt_of_several_withdraws_the_others(gateway: Harness) -> None:
    gateway.decode.hold_after_first = asyncio.Event()
    request = asyncio.create_task(gateway.post(COMPLETIONS, {**body(SHORT), "prompt": ["a", "b"]}))
    await has(gateway.decode.received)
    await has(gateway.decode.received)
    gateway.decode.cut_after_events = 2
    gateway.decode.hold_after_first.set()
    status, answer, _ = await request
    assert (status, answer["error"]["code"]) == (503, "worker_lost")
    await idle(gateway)


async def test_connections_to_workers_are_reused(gateway: Harness) -> None:
    for i in range(5):
        await complete(gateway, f"{i}")
    assert len(gateway.decode.asked_from) == 1


async def test_requests_unknown_or_waited_for(gateway: Harness) -> None:
    assert (await gateway.get("/v1/farfill/requests/nobody"))[0] == 404
    assert (await gateway.get("/v1/farfill/requests/nobody?wait_s=x"))[0] == 400
    waiting = asyncio.create_task(gateway.record("later"))
    await complete(gateway, SHORT, **{"X-Request-Id": "later"})
    assert (await waiting)["outcome"] == "ok"


async def test_instances_show_what_is_believed(gateway: Harness) -> None:
    status, shown, _ = await gateway.get("/v1/farfill/instances")
    assert status == 200
    by_name = {i["name"]: i for i in shown["instances"]}
    assert by_name["decode-near"]["state"] == "ready"
    assert by_name["prefill-far"]["breaker"] == "closed"
    assert by_name["prefill-far"]["outstanding_tokens"] == 0
